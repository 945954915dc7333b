//! Setters for structs that may grow: outside the crate a `#[non_exhaustive]` struct cannot be written as a literal, so each of its
//! fields has a method of the same name that sets it.

/// Writes a setter for each field; those after `optional` become `Some`.
macro_rules! setters {
    ($type:ident { $($field:ident: $value:ty),* $(,)? } $(optional { $($option:ident: $inner:ty),* $(,)? })?) => {
        impl $type {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](#structfield.", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, value: $value) -> Self {
                    self.$field = value.into();
                    self
                }
            )*
            $($(
                #[doc = concat!("Sets [`", stringify!($option), "`](#structfield.", stringify!($option), ").")]
                #[must_use]
                pub fn $option(mut self, value: $inner) -> Self {
                    self.$option = Some(value.into());
                    self
                }
            )*)?
        }
    };
}

pub(crate) use setters;

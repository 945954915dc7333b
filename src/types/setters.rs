//! Setters for `#[non_exhaustive]` structs: other crates cannot write them as a literal, so each field has a method of
//! the same name that sets it.

/// Defines a setter for each field. The setters after `optional` wrap the value in `Some`.
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

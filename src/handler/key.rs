//! Handler keys: the stable text names that deliveries are stored under.
//!
//! A key that exists is a key that is allowed: 1 to 100 characters of `A-Z a-z 0-9 . _ - : /`. A constant key that is not
//! does not compile; one made at run time is an error. A key is never derived from a type's name, so that renaming code
//! renames nothing in the database.

use std::borrow::Cow;
use std::fmt;

use crate::types::{Error, Result};

/// The most characters a key may have.
const KEY_CHARS_MAX: usize = 100;

/// The stable name of a handler.
///
/// ```
/// use wharf::HandlerKey;
/// const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve");
/// assert_eq!(RESERVE_STOCK.as_str(), "stock.reserve");
/// ```
///
/// A constant that is not allowed does not compile:
///
/// ```compile_fail
/// const BAD: wharf::HandlerKey = wharf::HandlerKey::new("no spaces");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandlerKey(Cow<'static, str>);

impl HandlerKey {
    /// A key known when the program is compiled. In a `const` a bad key is a compile error.
    ///
    /// # Panics
    /// When the key is not allowed and the call is not in a constant; use [`HandlerKey::parse`] for such keys.
    #[allow(clippy::panic)] // in a const this is the compile error we want
    pub const fn new(key: &'static str) -> Self {
        match check(key) {
            Ok(()) => Self(Cow::Borrowed(key)),
            Err(problem) => panic!("{}", problem.text()),
        }
    }

    /// A key known only at run time, for example from a configuration file.
    ///
    /// # Errors
    /// When the key is empty, longer than 100 characters or has a character that is not allowed.
    pub fn parse(key: impl Into<String>) -> Result<Self> {
        let key = key.into();
        match check(&key) {
            Ok(()) => Ok(Self(Cow::Owned(key))),
            Err(problem) => {
                Err(Error::configuration(format!("cannot use {key:?} as a handler key: {}", problem.text())))
            }
        }
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<HandlerKey> for String {
    fn from(HandlerKey(key): HandlerKey) -> Self {
        key.into_owned()
    }
}

impl fmt::Display for HandlerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

enum KeyProblem {
    Empty,
    TooLong,
    Character,
}

impl KeyProblem {
    const fn text(&self) -> &'static str {
        match self {
            Self::Empty => "a handler key has at least 1 character",
            Self::TooLong => "a handler key has at most 100 characters",
            Self::Character => "a handler key has only A-Z a-z 0-9 . _ - : /",
        }
    }
}

const fn check(key: &str) -> std::result::Result<(), KeyProblem> {
    let bytes = key.as_bytes();
    if bytes.is_empty() {
        return Err(KeyProblem::Empty);
    }
    if bytes.len() > KEY_CHARS_MAX {
        return Err(KeyProblem::TooLong);
    }
    let mut index = 0;
    while index < bytes.len() {
        let byte = bytes[index];
        if !(byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b':' | b'/')) {
            return Err(KeyProblem::Character);
        }
        index += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_1_to_100_allowed_characters() {
        for good in ["a", "stock.reserve", "A-1_b:c/d", &"k".repeat(100)] {
            assert_eq!(HandlerKey::parse(good).unwrap().as_str(), good);
        }
        for bad in ["", " ", "a b", "é", "a\0", "k\n", &"k".repeat(101)] {
            assert!(HandlerKey::parse(bad).unwrap_err().is_configuration());
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_key_or_an_error_that_quotes_it(text in "\\PC*") {
            match HandlerKey::parse(text.clone()) {
                Ok(key) => prop_assert_eq!(key.as_str(), text),
                Err(error) => {
                    let quoted = format!("{text:?}");
                    prop_assert!(error.to_string().contains(&quoted));
                }
            }
        }
    }
}

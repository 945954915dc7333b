//! Handler keys: the stable names under which deliveries are stored.
//!
//! A `HandlerKey` is always valid: 1 to 100 characters of `A-Z a-z 0-9 . _ - : /`. An invalid constant does not
//! compile; an invalid key at run time is an error. A key is never derived from a type name, so renaming code changes
//! nothing in the database.

use std::borrow::Cow;
use std::fmt;

use crate::types::{Error, Result};

/// The maximum length of a key.
const KEY_CHARS_MAX: usize = 100;

/// The stable name of a handler, under which its deliveries are stored: 1 to 100 characters of `A-Z a-z 0-9 . _ - : /`.
///
/// You can rename the function freely as long as the key stays. To change the key, name the old one with
/// [`Registration::formerly`](crate::Registration::formerly).
///
/// ```
/// use wharf::HandlerKey;
///
/// const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve");
/// assert_eq!(RESERVE_STOCK.as_str(), "stock.reserve");
/// ```
///
/// An invalid constant does not compile:
///
/// ```compile_fail
/// const BAD: wharf::HandlerKey = wharf::HandlerKey::new("no spaces");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandlerKey(Cow<'static, str>);

impl HandlerKey {
    /// Creates a key that is known at compile time. In a `const`, an invalid key is a compile error.
    ///
    /// ```
    /// const SEND_RECEIPT: wharf::HandlerKey = wharf::HandlerKey::new("mail.receipt");
    /// assert_eq!(SEND_RECEIPT.as_str(), "mail.receipt");
    /// ```
    ///
    /// # Panics
    /// When the key is invalid and the call is not in a constant. Use [`HandlerKey::parse`] for keys that are known
    /// only at run time.
    #[allow(clippy::panic)] // in a const this is the compile error we want
    pub const fn new(key: &'static str) -> Self {
        match check(key) {
            Ok(()) => Self(Cow::Borrowed(key)),
            Err(problem) => panic!("{}", problem.text()),
        }
    }

    /// Creates a key that is known only at run time, for example from a configuration file.
    ///
    /// ```
    /// use wharf::HandlerKey;
    ///
    /// let key = HandlerKey::parse(format!("mail.receipt.{}", "eu"))?;
    /// assert!(HandlerKey::parse("no spaces").unwrap_err().is_configuration());
    /// # Ok::<(), wharf::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the key is empty, is longer than 100 characters or contains an invalid character.
    pub fn parse(key: impl Into<String>) -> Result<Self> {
        let key = key.into();
        match check(&key) {
            Ok(()) => Ok(Self(Cow::Owned(key))),
            Err(problem) => {
                Err(Error::configuration(format!("cannot use {key:?} as a handler key: {}", problem.text())))
            }
        }
    }

    /// Returns the key as text.
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

/// Why a key is invalid. An enum, because a `const fn` cannot format text.
enum KeyProblem {
    Empty,
    TooLong,
    Character,
}

impl KeyProblem {
    const fn text(&self) -> &'static str {
        match self {
            Self::Empty => "a handler key must not be empty",
            Self::TooLong => "a handler key must have at most 100 characters",
            Self::Character => "a handler key may contain only A-Z a-z 0-9 . _ - : /",
        }
    }
}

/// Checks a key, also at compile time: only operations that are allowed in a `const fn` are used.
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

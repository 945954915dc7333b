//! The part of a record that an ordering key or a tenant is read from.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::types::Record;

/// A part of a record. `accept/order.rs` reads it.
#[derive(Clone)]
pub(crate) enum KeyPlace {
    /// The key of the record.
    RecordKey,
    /// The first header of this name.
    Header(String),
    /// A string or number in the JSON payload, at an RFC 6901 pointer.
    JsonPointer(String),
    /// The result of the user's function.
    Function(KeyFn),
}

/// The user's function. It may panic: the caller catches that.
pub(crate) type KeyFn = Arc<dyn Fn(&Record) -> Option<Bytes> + Send + Sync>;

impl KeyPlace {
    pub(super) fn by<K: Into<Bytes>>(function: impl Fn(&Record) -> Option<K> + Send + Sync + 'static) -> Self {
        Self::Function(Arc::new(move |record| function(record).map(Into::into)))
    }
}

impl fmt::Debug for KeyPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RecordKey => f.write_str("the record's key"),
            Self::Header(name) => write!(f, "the header {name:?}"),
            Self::JsonPointer(pointer) => write!(f, "the JSON pointer {pointer:?}"),
            Self::Function(_) => f.write_str("a function"),
        }
    }
}

//! Order: by which key the deliveries of a handler run one at a time, and what a poisoned one does to its key.
//!
//! Only what a user says stands here, and what is wrong with it; `accept/order.rs` reads the key out of records.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::types::Record;

/// The key that deliveries of a handler are ordered by. Given to [`Registration::ordered_by`](crate::Registration::ordered_by).
///
/// Deliveries of one key run one at a time, in the order in which their messages were accepted: for records of one partition that is the order
/// of their offsets. The next one runs when the one before it is done or discarded, however often that is retried, and whichever process
/// runs it. Other keys, and other handlers, do not wait.
///
/// A record without a value, with an empty one, or with one that cannot be read (the payload is not JSON, the pointer finds an object, the
/// function panics) is in no order: it runs at once, beside any other.
///
/// ```
/// use wharf::order::{OnPoison, OrderKey};
/// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
///
/// async fn move_stock(order: Message<Raw>) -> Result<(), Failure> {
///     Ok(())
/// }
///
/// let by_key: Registration<Postgres> = handler(HandlerKey::new("stock.move"), move_stock).ordered_by(OrderKey::record_key());
///
/// let by_customer = OrderKey::json_pointer("/customer/id").on_poison(OnPoison::Pass);
/// let registration: Registration<Postgres> = handler(HandlerKey::new("mail.receipt"), move_stock).ordered_by(by_customer);
/// ```
#[derive(Clone)]
#[must_use = "an order does nothing until a handler has it"]
pub struct OrderKey {
    pub(crate) place: OrderPlace,
    pub(crate) on_poison: OnPoison,
}

/// Where the key stands.
#[derive(Clone)]
pub(crate) enum OrderPlace {
    RecordKey,
    Header(String),
    JsonPointer(String),
    Function(OrderFn),
}

pub(crate) type OrderFn = Arc<dyn Fn(&Record) -> Option<Bytes> + Send + Sync>;

/// What a poisoned delivery of an ordered handler does to those behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnPoison {
    /// It holds its key: the others of the key wait until a person replays or discards it. Other keys flow.
    #[default]
    Hold,
    /// The next one of the key runs. A replay runs the poisoned one later, when no other of its key is running.
    ///
    /// A delivery that was poisoned because no live process knew its handler holds its key nevertheless: it returns by itself.
    Pass,
}

impl OrderKey {
    /// The record's key: what Kafka partitions by, so that the order is the one in which the producer wrote.
    pub fn record_key() -> Self {
        Self::at(OrderPlace::RecordKey)
    }

    /// The value of a header. The first header of the name counts. Names are case-sensitive.
    pub fn header(name: impl Into<String>) -> Self {
        Self::at(OrderPlace::Header(name.into()))
    }

    /// What an RFC 6901 pointer (`/customer/id`) finds in the JSON payload: a string, or a number as it is written.
    pub fn json_pointer(pointer: impl Into<String>) -> Self {
        Self::at(OrderPlace::JsonPointer(pointer.into()))
    }

    /// What a function says; `None` for a record in no order. It must say the same each time it sees the same record. It is called while
    /// records are accepted, so it should be quick. [`Record::id`] is the identity that the record is stored under.
    pub fn by<K: Into<Bytes>>(function: impl Fn(&Record) -> Option<K> + Send + Sync + 'static) -> Self {
        Self::at(OrderPlace::Function(Arc::new(move |record| function(record).map(Into::into))))
    }

    /// What a poisoned delivery does to its key. Default: [`OnPoison::Hold`]. A change counts for what is poisoned from then on.
    pub fn on_poison(mut self, on_poison: OnPoison) -> Self {
        self.on_poison = on_poison;
        self
    }

    fn at(place: OrderPlace) -> Self {
        Self { place, on_poison: OnPoison::default() }
    }
}

impl fmt::Debug for OrderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match &self.place {
            OrderPlace::RecordKey => "the record's key".to_owned(),
            OrderPlace::Header(name) => format!("the header {name:?}"),
            OrderPlace::JsonPointer(pointer) => format!("the JSON pointer {pointer:?}"),
            OrderPlace::Function(_) => "a function".to_owned(),
        };
        f.debug_struct("OrderKey").field("place", &format_args!("{place}")).field("on_poison", &self.on_poison).finish()
    }
}

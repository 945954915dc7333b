//! Order: the key by which deliveries of a handler run one at a time, and whether a poisoned delivery blocks its key.
//!
//! This file has the option only. `accept/order.rs` reads the key from records.

use bytes::Bytes;

use super::key_place::KeyPlace;
use super::registration::Registration;
use crate::store::Backend;
use crate::types::Record;

/// The key by which deliveries of a handler are ordered. [`Registration::ordered_by`](crate::Registration::ordered_by)
/// takes it.
///
/// Deliveries with the same key run one at a time, in the order in which their messages were accepted. For records of
/// one partition that is the order of their offsets. The next delivery runs when the one before it is done or
/// discarded, however often it is retried and whichever process runs it. Other keys and other handlers do not wait.
///
/// A record has no order if the value is missing or empty, or cannot be read: the payload is not JSON, the pointer
/// finds an object, the function panics. It runs at once, concurrently with any other.
///
/// ```
/// use wharf::order::{OnPoison, OrderKey};
///
/// let by_record_key = OrderKey::record_key();
/// let by_customer = OrderKey::json_pointer("/customer/id").on_poison(OnPoison::Pass);
/// let by_account = OrderKey::header("account");
/// let by_code = OrderKey::by(|record| record.key().map(|key| key.to_ascii_lowercase()));
/// ```
#[derive(Debug, Clone)]
#[must_use = "pass this order to `Registration::ordered_by`"]
pub struct OrderKey {
    pub(crate) place: KeyPlace,
    pub(crate) on_poison: OnPoison,
}

/// What a poisoned delivery of an ordered handler does to the later deliveries of its key. [`OrderKey::on_poison`]
/// takes it.
///
/// ```
/// use wharf::order::{OnPoison, OrderKey};
///
/// let key = OrderKey::record_key().on_poison(OnPoison::Pass);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnPoison {
    /// It blocks its key: later deliveries of the key wait until a person replays or discards it. Other keys continue.
    #[default]
    Hold,
    /// The next delivery of the key runs. After a replay, the poisoned one runs when no other delivery of its key is
    /// running.
    ///
    /// A delivery that was poisoned because no live process knew its handler still blocks its key, because it becomes
    /// pending again by itself.
    Pass,
}

impl OrderKey {
    /// Uses the record's key. Kafka partitions by it, so the order is the one in which the producer wrote.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler, order::OrderKey};
    /// # async fn move_stock(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("stock.move"), move_stock).ordered_by(OrderKey::record_key())
    /// # ;
    /// ```
    pub fn record_key() -> Self {
        Self::at(KeyPlace::RecordKey)
    }

    /// Uses the value of a header. If there are several headers of the name, the first counts. Names are
    /// case-sensitive.
    ///
    /// ```
    /// let by_account = wharf::order::OrderKey::header("account");
    /// ```
    pub fn header(name: impl Into<String>) -> Self {
        Self::at(KeyPlace::Header(name.into()))
    }

    /// Uses the value at an RFC 6901 pointer (`/customer/id`) in the JSON payload: a string, or a number as it is
    /// written.
    ///
    /// ```
    /// let by_customer = wharf::order::OrderKey::json_pointer("/customer/id");
    /// ```
    pub fn json_pointer(pointer: impl Into<String>) -> Self {
        Self::at(KeyPlace::JsonPointer(pointer.into()))
    }

    /// Uses the result of a function; `None` means that the record has no order. The function must return the same key
    /// each time it gets the same record. It is called while records are accepted, so it should be fast. [`Record::id`]
    /// is the identity under which the record is stored.
    ///
    /// ```
    /// // Ids like `order-17/placed`: the events of one order are in order.
    /// let by_order = wharf::order::OrderKey::by(|record| {
    ///     record.id().and_then(|id| id.split(|byte| *byte == b'/').next()).map(<[u8]>::to_vec)
    /// });
    /// ```
    pub fn by<K: Into<Bytes>>(function: impl Fn(&Record) -> Option<K> + Send + Sync + 'static) -> Self {
        Self::at(KeyPlace::by(function))
    }

    /// Sets whether a poisoned delivery blocks its key. Default: [`OnPoison::Hold`]. A change applies to deliveries
    /// that are poisoned after it.
    ///
    /// ```
    /// use wharf::order::{OnPoison, OrderKey};
    ///
    /// // A poisoned delivery does not delay the others of its customer.
    /// let key = OrderKey::json_pointer("/customer/id").on_poison(OnPoison::Pass);
    /// ```
    pub fn on_poison(mut self, on_poison: OnPoison) -> Self {
        self.on_poison = on_poison;
        self
    }

    /// An order by this part of a record, with the default for poisoned deliveries.
    fn at(place: KeyPlace) -> Self {
        Self { place, on_poison: OnPoison::default() }
    }
}

impl<B: Backend> Registration<B> {
    /// Runs deliveries with the same key one at a time, in the order in which their messages were accepted, across all
    /// processes, crashes and retries. Deliveries with other keys run concurrently. Default: no order. See
    /// [`OrderKey`], also for the effect of a poisoned delivery.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::{State, TestInbox};
    /// # const MOVE_STOCK: HandlerKey = HandlerKey::new("stock.move");
    /// use wharf::order::OrderKey;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// // The first message fails once.
    /// let move_stock = |order: Message<Raw>| async move {
    ///     if order.id() == "move-1" && order.attempt() == 1 { Err(Failure::retry("locked")) } else { Ok(()) }
    /// };
    /// let move_stock = handler(MOVE_STOCK, move_stock).ordered_by(OrderKey::record_key());
    /// let inbox = TestInbox::new(|inbox| inbox.subscribe("stock", move_stock)).await?;
    /// for id in ["move-1", "move-2"] {
    ///     inbox.accept(Record::new("stock").with_id(id).with_key("apples")).await?;
    /// }
    /// inbox.drain().await?;
    /// inbox.assert_state("move-2", MOVE_STOCK, State::Pending).await; // it waits for the retry of move-1
    /// # Ok(()) }
    /// ```
    ///
    /// Deliveries of an ordered handler are claimed in the database and never handed over from memory, and a key
    /// completes one delivery for each claim and settlement. So throughput comes from many keys, such as customers.
    ///
    /// Deliveries that were stored before the handler was ordered have no order. When you remove the option, deliveries
    /// that were stored in order still run in order, concurrently with new ones. While builds with and without the
    /// option run at the same time, records that the build without it accepts have no order: stop the old processes
    /// before you rely on it. An ordered handler cannot be delayed, fair, or share transactions; `build()` refuses it.
    pub fn ordered_by(mut self, order: OrderKey) -> Self {
        self.order = Some(order);
        self
    }
}

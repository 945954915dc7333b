//! Fairness: the key that says to which tenant a delivery belongs.
//!
//! This file has the option only. `accept/order.rs` reads the key from records, and the claim statement gives each
//! tenant its share.

use bytes::Bytes;

use super::key_place::KeyPlace;
use crate::types::Record;

/// The key that says to which tenant a delivery belongs: a customer, an account, a shop.
/// [`Registration::fair_by`](crate::Registration::fair_by) takes it.
///
/// A record belongs to no tenant if the value is missing or empty, or cannot be read: the payload is not JSON, the
/// pointer finds an object, the function panics. All of these records together take turns like one tenant.
///
/// ```
/// use wharf::flow::FairKey;
///
/// let by_header = FairKey::header("tenant");
/// let by_payload = FairKey::json_pointer("/tenant/id");
/// let by_code = FairKey::by(|record| record.key().map(|key| key.to_ascii_lowercase()));
/// ```
#[derive(Debug, Clone)]
#[must_use = "pass this key to `Registration::fair_by`"]
pub struct FairKey {
    pub(crate) place: KeyPlace,
}

impl FairKey {
    /// Uses the record's key.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, flow::FairKey, handler};
    /// # async fn send_mail(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.send"), send_mail).fair_by(FairKey::record_key())
    /// # ;
    /// ```
    pub fn record_key() -> Self {
        Self { place: KeyPlace::RecordKey }
    }

    /// Uses the value of a header. If there are several headers of the name, the first counts. Names are
    /// case-sensitive.
    ///
    /// ```
    /// let by_tenant = wharf::flow::FairKey::header("tenant");
    /// ```
    pub fn header(name: impl Into<String>) -> Self {
        Self { place: KeyPlace::Header(name.into()) }
    }

    /// Uses the value at an RFC 6901 pointer (`/tenant/id`) in the JSON payload: a string, or a number as it is
    /// written.
    ///
    /// ```
    /// let by_tenant = wharf::flow::FairKey::json_pointer("/tenant/id");
    /// ```
    pub fn json_pointer(pointer: impl Into<String>) -> Self {
        Self { place: KeyPlace::JsonPointer(pointer.into()) }
    }

    /// Uses the result of a function; `None` means no tenant. It is called while records are accepted, so it should be
    /// fast.
    ///
    /// ```
    /// // Topics like `orders.acme`: the tenant is the last part.
    /// let by_topic = wharf::flow::FairKey::by(|record| record.topic().rsplit('.').next().map(str::to_owned));
    /// ```
    pub fn by<K: Into<Bytes>>(function: impl Fn(&Record) -> Option<K> + Send + Sync + 'static) -> Self {
        Self { place: KeyPlace::by(function) }
    }
}

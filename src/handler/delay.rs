//! The options that decide when a delivery is due and when it expires: after a delay, at the time in a header, up to an
//! age.
//!
//! Pure. A header may contain any bytes.

use std::time::{Duration, SystemTime};

use super::registration::Registration;
use crate::store::Backend;
use crate::store::seam::Due;
use crate::types::Headers;

/// When new deliveries are due.
#[derive(Debug, Clone, Default)]
pub(crate) struct Delay {
    /// The delay after accept, if the record does not have the header.
    pub(crate) after: Option<Duration>,
    /// The header that has the delay or the time.
    pub(crate) header: Option<String>,
}

impl<B: Backend> Registration<B> {
    /// Delays new deliveries: they are due this long after their message is accepted, by the database's clock. Retries,
    /// replays and a backfill are not delayed. More than zero, at most 365 days. Default: due at once.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const REMIND: HandlerKey = HandlerKey::new("cart.remind");
    /// # async fn remind(cart: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use std::time::Duration;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// const HOUR: Duration = Duration::from_secs(3_600);
    /// let remind = handler(REMIND, remind).delay(HOUR);
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("carts", remind)).await?;
    /// # inbox.accept(Record::new("carts").with_id("cart-4")).await?;
    /// // … after a record is accepted:
    /// assert_eq!(inbox.drain().await?, 0);
    /// inbox.advance(HOUR).await?;
    /// assert_eq!(inbox.drain().await?, 1);
    /// # Ok(()) }
    /// ```
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay.after = Some(delay);
        self
    }

    /// Delays new deliveries until the time in this header of the record: a duration after accept (`90s`, `1h 30m`), or
    /// an RFC 3339 time (`2026-01-31T09:00:00Z`). Without the header, [`Registration::delay`] applies. With a value
    /// that is neither, the delivery is due at once, and the warning `delay cannot be read` names the message. More than
    /// ten years count as ten years. A delay beyond [`Registration::expires_after`] lets the delivery expire unrun.
    /// Default: no header.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Record, Registration, handler};
    /// # async fn remind(cart: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("cart.remind"), remind).delay_header("remind-at")
    /// # ;
    /// // A producer sets the header:
    /// let record = Record::new("carts").with_id("cart-4").with_header("remind-at", "2026-01-31T09:00:00Z");
    /// ```
    pub fn delay_header(mut self, name: impl Into<String>) -> Self {
        self.delay.header = Some(name.into());
        self
    }

    /// Discards deliveries whose message was accepted longer ago than this, by the database's clock, with the reason
    /// `expired`. The age is checked before each run, also before a retry. Deliveries that have been due for longer than
    /// this are discarded in bulk while they wait, at least every third of the lease, without a slot: a delayed or
    /// retried one may wait for longer than this, but does not run. Deliveries of an ordered handler that wait for an
    /// earlier one of their key are discarded in bulk too. A run that has begun continues. Nothing expires while the
    /// handler is paused, and deliveries that a person has replayed never expire. More than zero, at most 365 days.
    /// Default: never. Set it for messages that are worthless when old.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::{State, TestInbox};
    /// # const PUSH_PRICE: HandlerKey = HandlerKey::new("prices.push");
    /// # async fn push_price(price: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use std::time::Duration;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let push = handler(PUSH_PRICE, push_price).expires_after(Duration::from_secs(60));
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("prices", push)).await?;
    /// # inbox.accept(Record::new("prices").with_id("price-1")).await?;
    /// // … after a record is accepted:
    /// inbox.advance(Duration::from_secs(61)).await?;
    /// inbox.drain().await?;
    /// inbox.assert_state("price-1", PUSH_PRICE, State::Discarded).await;
    /// # Ok(()) }
    /// ```
    pub fn expires_after(mut self, age: Duration) -> Self {
        self.expires_after = Some(age);
        self
    }
}

/// The value of the header is neither a duration nor a time.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnreadableDelay;

impl Delay {
    /// Whether neither option is set.
    pub(crate) fn is_none(&self) -> bool {
        self.after.is_none() && self.header.is_none()
    }

    /// When a delivery of a message with these headers is due. `None` means at once.
    pub(crate) fn due(&self, headers: &Headers, now: SystemTime) -> Result<Option<Due>, UnreadableDelay> {
        match self.header.as_deref().and_then(|name| headers.get(name)) {
            None => Ok(self.after.map(Due::In)),
            Some(value) => {
                let due = read(value).ok_or(UnreadableDelay)?;
                let is_over = match due {
                    Due::In(after) => after.is_zero(),
                    Due::At(at) => at <= now,
                };
                Ok(if is_over { None } else { Some(due) })
            }
        }
    }
}

/// Reads the value of the header: a duration or a time.
fn read(value: &[u8]) -> Option<Due> {
    let text = std::str::from_utf8(value).ok()?.trim();
    humantime::parse_duration(text).ok().map(Due::In).or_else(|| time(text).map(Due::At))
}

/// RFC 3339, in UTC or with an offset.
fn time(text: &str) -> Option<SystemTime> {
    if let Ok(at) = humantime::parse_rfc3339(text) {
        return Some(at);
    }
    let (local, offset) = text.split_at_checked(text.len().checked_sub(6)?)?;
    let (hours, minutes) = offset.get(1..)?.split_once(':')?;
    let number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u64>().ok())?;
    let (hours, minutes) =
        (number(hours).filter(|hours| *hours < 24)?, number(minutes).filter(|minutes| *minutes < 60)?);
    let offset_by = Duration::from_secs(hours * 3_600 + minutes * 60);
    let at = humantime::parse_rfc3339(&format!("{local}Z")).ok()?;
    match offset.as_bytes().first()? {
        b'+' => at.checked_sub(offset_by),
        b'-' => at.checked_add(offset_by),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::Record;

    fn due(value: impl Into<bytes::Bytes>) -> Result<Option<Due>, UnreadableDelay> {
        let delay = Delay { after: Some(Duration::from_secs(60)), header: Some("due".to_owned()) };
        let record = Record::new("orders").with_header("due", value.into());
        delay.due(record.headers(), SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn a_header_is_a_duration_or_a_time_and_without_it_the_policy_applies() {
        let delay = Delay { after: Some(Duration::from_secs(60)), header: Some("due".to_owned()) };
        let none = Record::new("orders");
        assert_eq!(delay.due(none.headers(), SystemTime::now()), Ok(Some(Due::In(Duration::from_secs(60)))));
        assert_eq!(due("1h 30m"), Ok(Some(Due::In(Duration::from_secs(5_400)))));
        let at = |secs| Ok(Some(Due::At(SystemTime::UNIX_EPOCH + Duration::from_secs(secs))));
        assert_eq!(due("1970-01-02T00:00:00Z"), at(86_400));
        assert_eq!(due(" 1970-01-02T02:00:00+02:00 "), at(86_400));
        assert_eq!(
            due("1970-01-01T23:30:00.5-00:30"),
            Ok(Some(Due::At(SystemTime::UNIX_EPOCH + Duration::from_millis(86_400_500))))
        );
        // Nothing to wait for.
        assert_eq!(
            (due("0s"), due("1969-12-31T23:59:59Z"), due("1970-01-01T00:00:00Z")),
            (Ok(None), Err(UnreadableDelay), Ok(None))
        );
    }

    #[test]
    fn a_value_that_is_neither_is_refused() {
        for value in [
            "",
            "soon",
            "30",
            "-5s",
            "1970-01-02",
            "1970-01-02T00:00:00",
            "1970-01-02T00:00:00+2:00",
            "1970-01-02T00:00:00+99:00",
        ] {
            assert_eq!(due(value), Err(UnreadableDelay), "{value}");
        }
        assert_eq!(due(vec![0xff, 0x00]), Err(UnreadableDelay));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(value in any::<Vec<u8>>(), text in "[-+0-9:TZ. é]{0,40}") {
            let _ = due(value);
            let _ = due(text);
        }
    }
}

//! When deliveries of a handler are due: at once, after a delay, or when a header says. Pure; hostile bytes welcome.

use std::time::{Duration, SystemTime};

use crate::store::seam::Due;
use crate::types::Headers;

/// When new deliveries are due.
#[derive(Debug, Clone, Default)]
pub(crate) struct Delay {
    /// After they are accepted, where no header says otherwise.
    pub(crate) after: Option<Duration>,
    /// The header that says it.
    pub(crate) header: Option<String>,
}

/// The header's value is neither a duration nor a time.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnreadableDelay;

impl Delay {
    pub(crate) fn is_none(&self) -> bool {
        self.after.is_none() && self.header.is_none()
    }

    /// When a delivery of a message with these headers is due; `None`: at once.
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
    fn a_header_is_a_duration_or_a_time_and_without_it_the_policy_counts() {
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
    fn what_is_neither_is_not_guessed_at() {
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
        fn no_bytes_make_it_panic(value in any::<Vec<u8>>(), text in "[-+0-9:TZ. é]{0,40}") {
            let _ = due(value);
            let _ = due(text);
        }
    }
}

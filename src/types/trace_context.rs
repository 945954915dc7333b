//! The trace of a record: the W3C headers `traceparent`, `tracestate` and `baggage`, parsed strictly.
//!
//! The headers come from outside. A header that does not follow the W3C recommendations is ignored: without a valid
//! `traceparent` there is no trace; an invalid `tracestate` or `baggage` is left out, and the trace stays. Nothing here
//! panics or exceeds the limits below.

use std::fmt;

use super::Headers;

pub(crate) const TRACEPARENT: &str = "traceparent";
pub(crate) const TRACESTATE: &str = "tracestate";
pub(crate) const BAGGAGE: &str = "baggage";

/// The length of a `traceparent` of version 00. Later versions may be longer.
const TRACEPARENT_BYTES: usize = 55;
/// Limits of the W3C recommendations for `tracestate` and `baggage`.
const STATE_BYTES_MAX: usize = 512;
const STATE_MEMBERS_MAX: usize = 32;
const BAGGAGE_BYTES_MAX: usize = 8_192;
const BAGGAGE_MEMBERS_MAX: usize = 64;

/// A span in the headers of a record: the W3C trace context and its baggage.
///
/// ```
/// use wharf::Record;
/// use wharf::traces::TraceContext;
///
/// let trace = TraceContext::new([7; 16], [9; 8], 1).expect("the ids are not zero").with_baggage("tenant=a");
/// let record = Record::new("orders").with_trace(&trace);
/// assert_eq!(TraceContext::of(record.headers()), Some(trace));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct TraceContext {
    trace_id: [u8; 16],
    span_id: [u8; 8],
    flags: u8,
    state: Option<Box<str>>,
    baggage: Option<Box<str>>,
}

impl TraceContext {
    /// Creates a context from the ids of a span. The lowest bit of `flags` means that it is sampled. `None` when one of
    /// the ids is zero, which is invalid.
    ///
    /// ```
    /// use wharf::traces::TraceContext;
    ///
    /// let sampled = TraceContext::new([7; 16], [9; 8], 1).expect("the ids are not zero");
    /// assert_eq!((sampled.trace_id(), sampled.span_id(), sampled.flags()), ([7; 16], [9; 8], 1));
    /// assert_eq!(TraceContext::new([0; 16], [9; 8], 1), None);
    /// ```
    pub fn new(trace_id: [u8; 16], span_id: [u8; 8], flags: u8) -> Option<Self> {
        let is_valid = trace_id != [0; 16] && span_id != [0; 8];
        is_valid.then_some(Self { trace_id, span_id, flags, state: None, baggage: None })
    }

    /// Reads the context from the headers of a record. `None` when there is no `traceparent`, an invalid one, or
    /// several that differ.
    ///
    /// ```
    /// use wharf::Record;
    /// use wharf::traces::TraceContext;
    ///
    /// let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /// let record = Record::new("orders").with_header("traceparent", traceparent);
    /// let trace = TraceContext::of(record.headers()).expect("the header is valid");
    /// assert_eq!(trace.traceparent(), traceparent);
    /// ```
    pub fn of(headers: &Headers) -> Option<Self> {
        let mut named = headers.iter().filter(|(name, _)| *name == TRACEPARENT.as_bytes());
        let (_, value) = named.next()?;
        // If they differ, it is unknown which one is right.
        if named.any(|(_, other)| other != value) {
            return None;
        }
        let mut read = parse_traceparent(value?)?;
        read.state = joined(headers, TRACESTATE, STATE_BYTES_MAX).filter(|state| is_state(state)).map(Into::into);
        read.baggage = joined(headers, BAGGAGE, BAGGAGE_BYTES_MAX).filter(|list| is_baggage(list)).map(Into::into);
        Some(read)
    }

    /// Sets the data of tracing systems (`tracestate`). A text that the W3C recommendation does not allow is ignored.
    ///
    /// ```
    /// # use wharf::traces::TraceContext;
    /// # let trace = TraceContext::new([7; 16], [9; 8], 1).expect("the ids are not zero");
    /// assert_eq!(trace.clone().with_state("vendor=a").state(), Some("vendor=a"));
    /// assert_eq!(trace.with_state("not valid").state(), None);
    /// ```
    #[must_use]
    pub fn with_state(mut self, state: &str) -> Self {
        self.state = (state.len() <= STATE_BYTES_MAX && is_state(state)).then(|| state.into());
        self
    }

    /// Sets the data of the application, in the format of the header `baggage`. A text that the W3C recommendation does
    /// not allow is ignored.
    ///
    /// ```
    /// # use wharf::traces::TraceContext;
    /// # let trace = TraceContext::new([7; 16], [9; 8], 1).expect("the ids are not zero");
    /// assert_eq!(trace.with_baggage("tenant=a").baggage(), Some("tenant=a"));
    /// ```
    #[must_use]
    pub fn with_baggage(mut self, baggage: &str) -> Self {
        self.baggage = (baggage.len() <= BAGGAGE_BYTES_MAX && is_baggage(baggage)).then(|| baggage.into());
        self
    }

    /// The id of the trace.
    pub fn trace_id(&self) -> [u8; 16] {
        self.trace_id
    }

    /// The id of the span.
    pub fn span_id(&self) -> [u8; 8] {
        self.span_id
    }

    /// The flags; the lowest bit means that the span is sampled.
    pub fn flags(&self) -> u8 {
        self.flags
    }

    /// The value of `tracestate`.
    pub fn state(&self) -> Option<&str> {
        self.state.as_deref()
    }

    /// The value of `baggage`.
    pub fn baggage(&self) -> Option<&str> {
        self.baggage.as_deref()
    }

    /// The value of `traceparent`.
    pub fn traceparent(&self) -> String {
        let (trace_id, span_id) = (u128::from_be_bytes(self.trace_id), u64::from_be_bytes(self.span_id));
        format!("00-{trace_id:032x}-{span_id:016x}-{:02x}", self.flags)
    }
}

/// The baggage is not shown, because it may contain data of the application.
impl fmt::Debug for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TraceContext").field(&self.traceparent()).finish()
    }
}

/// Parses a `traceparent`: version, trace id, span id and flags, separated by dashes.
fn parse_traceparent(value: &[u8]) -> Option<TraceContext> {
    let (known, more) = value.split_at_checked(TRACEPARENT_BYTES)?;
    let [version] = hex(&known[..2])?;
    // Later versions may have more parts after a dash. Version 255 is invalid.
    let is_complete = match version {
        0 => more.is_empty(),
        255 => false,
        _ => more.is_empty() || more.starts_with(b"-"),
    };
    let has_dashes = [2, 35, 52].iter().all(|&at| known[at] == b'-');
    if !is_complete || !has_dashes {
        return None;
    }
    let [flags] = hex(&known[53..])?;
    TraceContext::new(hex(&known[3..35])?, hex(&known[36..52])?, flags)
}

/// Parses lower-case hexadecimal digits, two for each byte. The W3C recommendation does not allow upper case.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = digits.as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

/// Joins all headers of a name into one list. `None` when there is none, or the list is too long or not text.
fn joined(headers: &Headers, name: &str, bytes_max: usize) -> Option<String> {
    let mut list = String::new();
    for (_, value) in headers.iter().filter(|(header, _)| *header == name.as_bytes()) {
        let value = std::str::from_utf8(value.unwrap_or_default()).ok()?;
        let comma = if list.is_empty() || value.is_empty() { "" } else { "," };
        if list.len() + comma.len() + value.len() > bytes_max {
            return None;
        }
        list.extend([comma, value]);
    }
    (!list.is_empty()).then_some(list)
}

/// Whether the W3C recommendation allows this `tracestate`.
fn is_state(list: &str) -> bool {
    let members = || list.split(',').map(|member| member.trim_matches([' ', '\t'])).filter(|member| !member.is_empty());
    let is_member =
        |member: &str| member.split_once('=').is_some_and(|(key, value)| is_state_key(key) && is_state_value(value));
    (1..=STATE_MEMBERS_MAX).contains(&members().count()) && members().all(is_member)
}

fn is_state_key(key: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-*/@".contains(&byte);
    key.len() <= 256 && key.starts_with(|first: char| first.is_ascii_alphanumeric()) && key.bytes().all(is_letter)
}

fn is_state_value(value: &str) -> bool {
    (1..=256).contains(&value.len()) && value.bytes().all(|byte| matches!(byte, b' '..=b'~') && !b",=".contains(&byte))
}

/// Whether the W3C recommendation allows this `baggage`.
fn is_baggage(list: &str) -> bool {
    let members = || list.split(',');
    let is_member = |member: &str| {
        let is_plain = member.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\t'));
        let key = member.split_once('=').map(|(key, _)| key.trim_matches([' ', '\t']));
        is_plain && key.is_some_and(is_token)
    };
    members().count() <= BAGGAGE_MEMBERS_MAX && members().all(is_member)
}

/// Whether the text is a token as HTTP defines it.
fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(pairs: &[(&str, &[u8])]) -> Headers {
        let mut headers = Headers::default();
        pairs.iter().for_each(|(name, value)| headers.push(name.as_bytes(), Some(value)));
        headers
    }

    fn of_traceparent(value: &str) -> Option<TraceContext> {
        TraceContext::of(&headers(&[(TRACEPARENT, value.as_bytes())]))
    }

    #[test]
    fn a_traceparent_is_written_as_it_was_read() {
        assert_eq!(of_traceparent(PARENT).unwrap().traceparent(), PARENT);
        let later = format!("cc{}-more", &PARENT[2..]);
        assert_eq!(of_traceparent(&later).unwrap().traceparent(), PARENT);
    }

    #[test]
    fn an_invalid_traceparent_is_ignored() {
        let refused = [
            "",
            "00",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-",
            "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.",
            "00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0g",
            " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319\u{e9}-b7ad6b7169203331-01",
        ];
        for value in refused {
            assert_eq!(of_traceparent(value), None, "{value}");
        }
        let other = PARENT.replace("0af7", "1af7");
        let two = headers(&[(TRACEPARENT, PARENT.as_bytes()), (TRACEPARENT, other.as_bytes())]);
        assert_eq!(TraceContext::of(&two), None);
    }

    #[test]
    fn an_unreadable_state_or_baggage_is_left_out_and_the_trace_stays() {
        let of = |state: &[u8], baggage: &[u8]| {
            let read = TraceContext::of(&headers(&[
                (TRACEPARENT, PARENT.as_bytes()),
                (TRACESTATE, state),
                (BAGGAGE, baggage),
            ]));
            let read = read.unwrap();
            (read.state().map(str::to_owned), read.baggage().map(str::to_owned))
        };
        assert_eq!(of(b"rojo=1,t@x=2", b"tenant=a;p=1"), (Some("rojo=1,t@x=2".into()), Some("tenant=a;p=1".into())));
        for hostile in
            [b"=1".as_slice(), b"a", b"\xff=1", b"a=1\n", b"", b",", &b"a".repeat(600), "\u{e9}=1".as_bytes()]
        {
            assert_eq!(of(hostile, hostile), (None, None), "{hostile:?}");
        }
        let many = (0..40).map(|n| format!("k{n}=1")).collect::<Vec<_>>().join(",");
        assert_eq!(of(many.as_bytes(), many.repeat(60).as_bytes()), (None, None));
    }

    #[test]
    fn several_headers_of_a_list_are_one_list() {
        let read =
            TraceContext::of(&headers(&[(TRACEPARENT, PARENT.as_bytes()), (TRACESTATE, b"a=1"), (TRACESTATE, b"b=2")]));
        assert_eq!(read.unwrap().state(), Some("a=1,b=2"));
    }

    #[test]
    fn a_list_may_be_as_long_as_the_recommendation_allows_and_no_longer() {
        // Members of 256 and 255 bytes, and the comma between them.
        let member = |key: char, bytes: usize| format!("{key}={}", "v".repeat(bytes - 2));
        let of = |first: &str, second: &str| {
            let read = TraceContext::of(&headers(&[
                (TRACEPARENT, PARENT.as_bytes()),
                (TRACESTATE, first.as_bytes()),
                (TRACESTATE, second.as_bytes()),
            ]));
            read.unwrap().state().map(str::len)
        };
        let (first, second) = (member('a', 256), member('b', 255));
        assert_eq!(of(&first, &second), Some(STATE_BYTES_MAX));
        assert_eq!(of(&format!("{first},{second}"), ""), Some(STATE_BYTES_MAX));
        assert_eq!(of(&first, &member('b', 256)), None);
        let baggage = |bytes: usize| {
            let list = member('a', bytes);
            let read = TraceContext::of(&headers(&[(TRACEPARENT, PARENT.as_bytes()), (BAGGAGE, list.as_bytes())]));
            read.unwrap().baggage().map(str::len)
        };
        assert_eq!((baggage(BAGGAGE_BYTES_MAX), baggage(BAGGAGE_BYTES_MAX + 1)), (Some(BAGGAGE_BYTES_MAX), None));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic_the_reader(parent in any::<Vec<u8>>(), state in any::<Vec<u8>>(), list in any::<Vec<u8>>()) {
            let read = TraceContext::of(&headers(&[(TRACEPARENT, &parent), (TRACESTATE, &state), (BAGGAGE, &list)]));
            prop_assert!(read.is_none());
            let read = TraceContext::of(&headers(&[(TRACEPARENT, PARENT.as_bytes()), (TRACESTATE, &state), (BAGGAGE, &list)]));
            prop_assert!(read.is_some());
        }

        #[test]
        fn written_values_are_read_back(trace_id in any::<[u8; 16]>(), span_id in any::<[u8; 8]>(), flags in any::<u8>()) {
            let written = TraceContext::new(trace_id, span_id, flags);
            let read = written.as_ref().and_then(|written| of_traceparent(&written.traceparent()));
            prop_assert_eq!(read, written);
        }
    }
}

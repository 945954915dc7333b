//! Decodes the payload and the key that a visitor has requested, with the decoder of the program that serves the
//! dashboard.
//!
//! The decoder is user code and its input comes from outside, so everything about it is bounded: how many parts are
//! decoded at a time, how long a visitor waits, how much of the result is shown. A panic is caught. The raw bytes are
//! shown in any case; an error is shown beside them and never breaks the page.

use std::any::Any;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::text;
use crate::types::{Decoder, Encoded, Readable, Record, Undecoded, panic_text};

/// How many payloads and keys are decoded at a time.
const AT_ONCE_MAX: usize = 4;
/// How long a visitor waits. Longer than a registry takes until it counts as unavailable.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// How many bytes of a decoded payload or key are shown.
const SHOWN_BYTES_MAX: usize = 256 << 10;
/// How many bytes of an error or of the name of a format are shown.
const WORDS_BYTES_MAX: usize = 1 << 10;

pub(super) type ForPeople = Arc<dyn Decoder<Option<Readable>>>;

pub(super) struct Decoding {
    decoder: Option<ForPeople>,
    places: Arc<Semaphore>,
    wait_max: Duration,
}

/// A decoded payload or key for display.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DecodedView {
    /// `payload` or `key`.
    pub(super) what: &'static str,
    /// Empty if nothing was decoded.
    pub(super) format: String,
    /// The text, or a sentence that says why there is none.
    pub(super) text: Result<String, String>,
    pub(super) is_cut: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Payload,
    Key,
}

/// `None`: the decoder does not know the format. The error says why the bytes cannot be decoded.
type Found = Result<Option<ShownText>, String>;

/// What a page can show of a decoded value.
struct ShownText {
    format: String,
    text: String,
    is_cut: bool,
}

impl Decoding {
    pub(super) fn new(decoder: Option<ForPeople>) -> Self {
        Self { decoder, places: Arc::new(Semaphore::new(AT_ONCE_MAX)), wait_max: WAIT_MAX }
    }

    /// Decodes payload and key. Parts whose format the decoder does not know are left out.
    pub(super) async fn of(&self, record: &Record) -> Vec<DecodedView> {
        let Some(decoder) = &self.decoder else { return Vec::new() };
        let record = Arc::new(record.clone());
        let of = |part| self.part(Arc::clone(decoder), Arc::clone(&record), part);
        let (payload, key) = tokio::join!(of(Part::Payload), of(Part::Key));
        payload.into_iter().chain(key).collect()
    }

    async fn part(&self, decoder: ForPeople, record: Arc<Record>, part: Part) -> Option<DecodedView> {
        part.of(&record).payload()?;
        // Catches panics of `ready`. A panic of `decode` ends its thread, which returns it.
        let decoding = AssertUnwindSafe(decode(decoder, Arc::clone(&self.places), record, part)).catch_unwind();
        let found = match tokio::time::timeout(self.wait_max, decoding).await {
            Ok(Ok(found)) => found,
            Ok(Err(panic)) => Err(panicked(part, panic)),
            Err(_) => Err(format!("The {} was not decoded within {:?}.", part.name(), self.wait_max)),
        };
        let what = part.name();
        match found {
            Ok(None) => None,
            Ok(Some(ShownText { format, text, is_cut })) => Some(DecodedView { what, format, text: Ok(text), is_cut }),
            Err(why) => {
                let why = text::shown(why.as_bytes(), WORDS_BYTES_MAX);
                Some(DecodedView { what, format: String::new(), text: Err(why), is_cut: false })
            }
        }
    }
}

/// Decoding may take long, so it has a thread of its own. When the visitor has waited long enough, the thread keeps its
/// permit until the decoder returns.
async fn decode(decoder: ForPeople, places: Arc<Semaphore>, record: Arc<Record>, part: Part) -> Found {
    let permit = places.acquire_owned().await.map_err(|_| unexpected(part))?;
    if let Some(ready) = decoder.ready(&part.of(&record)) {
        ready.await.map_err(|undecoded| refused(part, &undecoded))?;
    }
    let thread = spawn_blocking(move || {
        let decoded = decoder.decode(&part.of(&record)).map(|decoded| decoded.as_ref().map(ShownText::new));
        drop(permit);
        decoded
    });
    match thread.await {
        Ok(decoded) => decoded.map_err(|undecoded| refused(part, &undecoded)),
        Err(ended) => Err(ended.try_into_panic().map_or_else(|_| unexpected(part), |panic| panicked(part, panic))),
    }
}

fn unexpected(part: Part) -> String {
    format!("The {} cannot be decoded: the dashboard is ending.", part.name())
}

fn refused(part: Part, undecoded: &Undecoded) -> String {
    let now = if undecoded.is_unavailable() { " now" } else { "" };
    format!("The {} cannot be decoded{now}: {undecoded}", part.name())
}

fn panicked(part: Part, panic: Box<dyn Any + Send>) -> String {
    format!("The {} cannot be decoded: the decoder panicked: {}", part.name(), panic_text(panic))
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Payload => "payload",
            Self::Key => "key",
        }
    }

    fn of(self, record: &Record) -> Encoded<'_> {
        match self {
            Self::Payload => Encoded::of(record),
            Self::Key => Encoded::of(record).of_key(),
        }
    }
}

impl ShownText {
    fn new(Readable { format, value }: &Readable) -> Self {
        let json;
        let written = match value {
            Value::String(text) => text.as_bytes(),
            value => {
                json = Limited::json(value);
                &json.0
            }
        };
        let (text, is_cut) = (text::shown(written, SHOWN_BYTES_MAX), written.len() > SHOWN_BYTES_MAX);
        Self { format: text::shown(format.as_bytes(), WORDS_BYTES_MAX), text, is_cut }
    }
}

/// Keeps one byte more than is shown, so that a large value is never written as a whole.
struct Limited(Vec<u8>);

impl Limited {
    fn json(value: &Value) -> Self {
        let mut limited = Self(Vec::new());
        // The only error is that the limit is reached.
        let _ = serde_json::to_writer_pretty(&mut limited, value);
        limited
    }
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = SHOWN_BYTES_MAX + 1 - self.0.len();
        let taken = bytes.len().min(room);
        self.0.extend_from_slice(&bytes[..taken]);
        // With 0 bytes taken, `write_all` fails, which ends the serialization.
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::BoxFuture;
    use serde_json::json;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    fn decoding(decoder: impl Decoder<Option<Readable>>) -> Decoding {
        Decoding::new(Some(Arc::new(decoder)))
    }

    fn sentence(found: &[DecodedView]) -> &str {
        let [DecodedView { text: Err(sentence), .. }] = found else { panic!("{found:?}") };
        sentence
    }

    /// Waits for something that never comes.
    struct NeverReady;

    impl Decoder<Option<Readable>> for NeverReady {
        fn decode(&self, _: &Encoded<'_>) -> Result<Option<Readable>, Undecoded> {
            Ok(None)
        }

        fn ready<'a>(&'a self, _: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
            Some(std::future::pending().boxed())
        }
    }

    /// Panics before it waits.
    struct PanicsEarly;

    impl Decoder<Option<Readable>> for PanicsEarly {
        fn decode(&self, _: &Encoded<'_>) -> Result<Option<Readable>, Undecoded> {
            Ok(None)
        }

        fn ready<'a>(&'a self, _: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
            panic!("no plan")
        }
    }

    #[tokio::test]
    async fn what_is_too_large_is_cut_and_what_is_not_known_is_left_out() {
        let found = decoding(|encoded: &Encoded<'_>| match encoded.is_key() {
            true => Ok(Some(Readable::new("f".repeat(5_000), vec![7; 1 << 20]))),
            false => Ok(None),
        });
        let record = Record::new("t").with_key("k").with_payload("p");
        let [key] = &found.of(&record).await[..] else { panic!() };
        let text = key.text.as_ref().unwrap();
        assert!(key.what == "key" && key.is_cut && text.ends_with('…') && text.len() < SHOWN_BYTES_MAX + 9);
        assert!(key.format.len() < WORDS_BYTES_MAX + 9);
        // A record without a key has no key to decode.
        assert_eq!(found.of(&Record::new("t").with_payload("p")).await, []);
        let whole = decoding(|_: &Encoded<'_>| Ok(Some(Readable::new("JSON", json!({ "a": [1] })))));
        let [payload] = &whole.of(&Record::new("t").with_payload("p")).await[..] else { panic!() };
        assert_eq!((payload.text.as_deref(), payload.is_cut), (Ok("{\n  \"a\": [\n    1\n  ]\n}"), false));
    }

    #[tokio::test]
    async fn a_decoder_that_hangs_or_panics_is_a_sentence() {
        let record = Record::new("t").with_payload("p");
        assert_eq!(
            sentence(&decoding(PanicsEarly).of(&record).await),
            "The payload cannot be decoded: the decoder panicked: no plan"
        );
        let hanging = Decoding { wait_max: Duration::from_millis(10), ..decoding(NeverReady) };
        for _ in 0..=AT_ONCE_MAX {
            assert_eq!(sentence(&hanging.of(&record).await), "The payload was not decoded within 10ms.");
        }
        assert_eq!(hanging.places.available_permits(), AT_ONCE_MAX);
    }

    #[tokio::test]
    async fn a_decoder_that_does_not_return_keeps_its_place_until_it_does() {
        let (end, ended): (Sender<()>, Receiver<()>) = channel();
        let ended = Mutex::new(ended);
        let blocking = decoding(move |_: &Encoded<'_>| {
            let _ = ended.lock().map(|ended| ended.recv());
            Ok(None)
        });
        let mut blocking = Decoding { wait_max: Duration::from_millis(10), ..blocking };
        let record = Record::new("t").with_payload("p");
        for _ in 0..=AT_ONCE_MAX {
            assert!(sentence(&blocking.of(&record).await).ends_with("within 10ms."));
        }
        assert_eq!(blocking.places.available_permits(), 0);
        drop(end);
        blocking.wait_max = WAIT_MAX;
        assert_eq!(blocking.of(&record).await, []);
    }
}

//! Decoders that identities need. Such a decoder may not be ready, because it needs a schema from a registry.
//!
//! Deciding what a record becomes does no I/O. If a decoder is needed that is not ready, the record is undecided; the
//! caller waits for that decoder and decides again with its answer. A decoder that fails for good, or panics, has
//! answered, and the record is quarantined. A decoder that is unavailable has not answered, and the record stays
//! undecided.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use serde_json::Value;

use super::acceptor::TOPIC_CHARS_SHOWN;
use super::batch::Row;
use super::identity::IdentityDecoder;
use super::intake::Intake;
use crate::store::Backend;
use crate::types::{self, Encoded, Error, Kind, Record, Result, sanitize};

/// The bounds of the pause before an unavailable decoder is asked again. The decoder suggests the pause.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// The reason when a decoder panics. The panic text is not used, because it may contain parts of the record.
const PANICKED: &str = "the decoder panicked";

/// What a record becomes, if that can be decided now.
pub(crate) enum Decision {
    /// Its row with the bytes that it takes in a batch; `None` when no handler wants it.
    Decided(Option<(Row, usize)>),
    /// A decoder has to be waited for.
    NotYet(Undecided),
}

/// A record whose identity needs a decoder that is not ready.
pub(crate) struct Undecided {
    pub(super) record: Box<Record>,
    /// The decoders that were waited for so far.
    pub(super) answers: Answers,
    pub(super) not_yet: NotYet,
}

/// The decoder that is not ready.
#[derive(Clone)]
pub(crate) struct NotYet {
    decoder: IdentityDecoder,
    /// Why it is unavailable; `None` if it has not been asked.
    cause: Option<types::Undecoded>,
}

/// Why a payload or a key is not decoded.
pub(super) enum Undecoded {
    /// It can never be decoded, for this reason.
    Never(String),
    /// The decoder is not ready.
    NotYet(NotYet),
}

/// The answers of the decoders that one record has waited for: ready, or why they can never decode it.
#[derive(Default)]
pub(super) struct Answers(Vec<(IdentityDecoder, std::result::Result<(), String>)>);

impl Answers {
    fn of(&self, decoder: &IdentityDecoder) -> Option<&std::result::Result<(), String>> {
        self.0.iter().find(|(asked, _)| is_same(asked, decoder)).map(|(_, answer)| answer)
    }

    fn set(&mut self, decoder: &IdentityDecoder, answer: std::result::Result<(), String>) {
        self.forget(decoder);
        self.0.push((Arc::clone(decoder), answer));
    }

    fn forget(&mut self, decoder: &IdentityDecoder) {
        self.0.retain(|(asked, _)| !is_same(asked, decoder));
    }
}

/// Whether these are the same decoder. Compares the data addresses only: a type may have several vtables.
fn is_same(one: &IdentityDecoder, other: &IdentityDecoder) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

impl std::fmt::Debug for NotYet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotYet").field("cause", &self.cause).finish_non_exhaustive()
    }
}

/// Decodes the payload or the key of a record, unless the decoder has to be waited for.
pub(super) fn decode(
    record: &Record,
    decoder: &IdentityDecoder,
    answers: &Answers,
) -> std::result::Result<Value, Undecoded> {
    let not_yet = |cause| Undecoded::NotYet(NotYet { decoder: Arc::clone(decoder), cause });
    // The decoder is user code: its panic must not end the accepting task.
    let panicked = |_| Undecoded::Never(PANICKED.to_owned());
    let encoded = Encoded::of(record);
    match answers.of(decoder) {
        Some(Ok(())) => {}
        Some(Err(why)) => return Err(Undecoded::Never(why.clone())),
        None if catch_unwind(AssertUnwindSafe(|| decoder.ready(&encoded).is_some())).map_err(panicked)? => {
            return Err(not_yet(None));
        }
        None => {}
    }
    let decoded = catch_unwind(AssertUnwindSafe(|| decoder.decode(&encoded))).map_err(panicked)?;
    decoded.map_err(|undecoded| match undecoded.is_unavailable() {
        true => not_yet(Some(undecoded)),
        false => Undecoded::Never(undecoded.to_string()),
    })
}

/// Why a decoder is unavailable, and the pause before it is asked again.
pub(crate) struct DecoderError {
    pub(crate) why: String,
    pub(crate) pause: Duration,
}

impl Undecided {
    /// Why the decoder is unavailable; `None` when it has not been asked, so that it can be asked without a pause.
    pub(crate) fn error(&self) -> Option<DecoderError> {
        let cause = self.not_yet.cause.as_ref()?;
        let pause = cause.pause().unwrap_or(PAUSE_MAX).clamp(PAUSE_MIN, PAUSE_MAX);
        Some(DecoderError { why: cause.to_string(), pause })
    }

    pub(crate) fn topic(&self) -> &Arc<str> {
        &self.record.topic
    }

    /// Asks the decoder once, for at most `wait_max`, and keeps its answer. Dropping the future keeps no answer.
    async fn ask(&mut self, wait_max: Duration) {
        let decoder = Arc::clone(&self.not_yet.decoder);
        self.answers.forget(&decoder);
        let encoded = Encoded::of(&self.record);
        let asking = AssertUnwindSafe(async {
            match decoder.ready(&encoded) {
                Some(ready) => ready.await,
                None => Ok(()),
            }
        });
        let answer = match tokio::time::timeout(wait_max, asking.catch_unwind()).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(undecoded))) if undecoded.is_unavailable() => {
                self.not_yet.cause = Some(undecoded);
                return;
            }
            Ok(Ok(Err(undecoded))) => Err(undecoded.to_string()),
            Ok(Err(_)) => Err(PANICKED.to_owned()),
            Err(_) => {
                self.not_yet.cause = Some(types::Undecoded::unavailable("the decoder was not ready in time"));
                return;
            }
        };
        self.answers.set(&decoder, answer);
    }
}

impl<B: Backend> Intake<B> {
    /// Asks the decoder that a record waits for, once, for at most `wait_max`, and decides again.
    pub(crate) async fn ask(&self, undecided: Undecided, wait_max: Duration) -> Decision {
        self.ask_with(undecided, wait_max, rand::random).await
    }

    /// Like [`Self::ask`]. `chance` provides the id of a record that is accepted without an identity.
    pub(super) async fn ask_with(
        &self,
        mut undecided: Undecided,
        wait_max: Duration,
        chance: impl FnOnce() -> u128,
    ) -> Decision {
        undecided.ask(wait_max).await;
        let is_answered = undecided.answers.of(&undecided.not_yet.decoder).is_some();
        match is_answered {
            true => self.decide_with(*undecided.record, undecided.answers, chance),
            false => Decision::NotYet(undecided),
        }
    }

    /// Decides what a record becomes; waits for decoders until the deadline.
    ///
    /// # Errors
    /// When a decoder is still unavailable at the deadline. A record that can never be decoded is not an error: it is
    /// quarantined.
    pub(super) async fn row_by(&self, record: Record, deadline: Instant) -> Result<Option<(Row, usize)>> {
        match self.decide(record) {
            Decision::Decided(row) => Ok(row),
            // Boxed, so that the common case has a small future.
            Decision::NotYet(undecided) => Box::pin(self.wait(undecided, deadline)).await,
        }
    }

    /// Waits for decoders until the record is decided, or until the deadline. Dropping the future drops the record.
    async fn wait(&self, mut undecided: Undecided, deadline: Instant) -> Result<Option<(Row, usize)>> {
        // The first cause is reported, because it is more specific than "not ready in time".
        let mut first = None;
        loop {
            if let Some(DecoderError { why, pause }) = undecided.error() {
                let why = first.get_or_insert(why);
                if Instant::now() + pause >= deadline {
                    return Err(not_now(undecided.topic(), why));
                }
                tokio::time::sleep(pause).await;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.ask(undecided, left).await {
                Decision::Decided(row) => return Ok(row),
                Decision::NotYet(still) => undecided = still,
            }
        }
    }

    /// Decides what a record becomes. Asks each decoder that is not ready once, without retries.
    ///
    /// # Errors
    /// When a decoder is unavailable, or is not ready at the deadline.
    pub(super) async fn row_once(
        &self,
        record: Record,
        deadline: Instant,
        chance: impl Fn() -> u128,
    ) -> Result<Option<(Row, usize)>> {
        let mut decision = self.decide_with(record, Answers::default(), &chance);
        loop {
            let undecided = match decision {
                Decision::Decided(row) => return Ok(row),
                Decision::NotYet(undecided) => undecided,
            };
            if let Some(DecoderError { why, .. }) = undecided.error() {
                return Err(not_now(undecided.topic(), &why));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            decision = self.ask_with(undecided, left, &chance).await;
        }
    }
}

/// The transient error for a record that cannot be decided now.
fn not_now(topic: &str, why: &str) -> Error {
    let topic = sanitize::text(topic, TOPIC_CHARS_SHOWN);
    let context = format!("cannot read the identity of a record of topic {topic} now");
    Error::new(Kind::Passing, context).with_source(why.to_owned())
}

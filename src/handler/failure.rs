//! What a handler returns instead of `Ok`: retry, retry at a given time, unavailable, poison, snooze or discard.
//!
//! `?` turns any error into a retry. The other variants have a constructor each. A failure is data and never stops the
//! engine.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, ErrorKind};
use std::time::Duration;

/// Why a handler did not succeed, and what happens to the delivery.
///
/// ```
/// use std::time::Duration;
/// use wharf::{Failure, Message};
///
/// async fn charge(order: Message<String>) -> Result<(), Failure> {
///     let amount: u32 = order.payload.parse()?; // any error: retried by the handler's policy
///     if amount == 0 {
///         return Err(Failure::poison("the amount is 0")); // no retry can help: a person decides
///     }
///     if amount > 10_000 {
///         return Err(Failure::snooze(Duration::from_secs(60))); // later, without consuming a retry
///     }
///     Ok(())
/// }
/// ```
///
/// `?` converts every error type: those that implement [`std::error::Error`], `Box<dyn Error + Send + Sync>`,
/// `anyhow::Error`, and text. For that reason `Failure` does not implement [`std::error::Error`] itself. The text of
/// the error, with its causes, is stored with the delivery; [`InboxBuilder::redact`](crate::InboxBuilder::redact) can
/// remove secrets from it.
#[derive(Clone)]
pub struct Failure {
    /// What the handler requests. The engine decides the outcome (`decide.rs`).
    pub(crate) kind: FailureKind,
    /// The error with its causes; the reason of a discard; empty for a snooze.
    pub(crate) error: String,
    /// Whether the error or one of its causes is a refused or lost connection.
    is_connection: bool,
}

/// What happens to the delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// A retry by the handler's policy.
    Retry,
    /// A retry after this time, which counts as a failure.
    RetryAfter(Duration),
    /// A dependency of the handler is unavailable. Without a breaker, like [`FailureKind::Retry`].
    Unavailable,
    /// Another run after this time, which consumes no retry.
    Snooze(Duration),
    /// No retry can help.
    Poison,
    /// The payload cannot be decoded into the handler's type.
    Undecodable,
    /// A dependency of the decoder is unavailable: another run after this time, which consumes no retry.
    NotDecodableNow(Duration),
    /// The message needs no work.
    Discard,
}

impl Failure {
    /// Retries by the handler's [`RetryPolicy`](crate::RetryPolicy). `?` on any error does the same.
    ///
    /// ```
    /// # use wharf::Failure;
    /// fn check(status: u16) -> Result<(), Failure> {
    ///     if status == 200 { Ok(()) } else { Err(Failure::retry(format!("the mail service answers {status}"))) }
    /// }
    /// ```
    pub fn retry(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::with(FailureKind::Retry, &*error.into())
    }

    /// Retries after `delay` instead of the policy's delay. It counts as a failure, so it consumes a retry.
    ///
    /// ```
    /// # use wharf::Failure;
    /// # use std::time::Duration;
    /// fn check(status: u16, retry_after: Duration) -> Result<(), Failure> {
    ///     match status {
    ///         429 => Err(Failure::retry_after(retry_after, "the mail service asks us to slow down")),
    ///         _ => Ok(()),
    ///     }
    /// }
    /// ```
    pub fn retry_after(delay: Duration, error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::with(FailureKind::RetryAfter(delay), &*error.into())
    }

    /// Reports that a dependency of the handler is unavailable, so that no delivery can succeed now. With a
    /// [`breaker`](crate::Registration::breaker) it consumes no retry, and several in a row open the breaker. Without
    /// one it is the same as [`Failure::retry`].
    ///
    /// ```
    /// # use wharf::Failure;
    /// fn check(status: u16) -> Result<(), Failure> {
    ///     match status {
    ///         200..=299 => Ok(()),
    ///         502..=504 => Err(Failure::unavailable(format!("the mail service answers {status}"))),
    ///         _ => Err(Failure::retry(format!("status {status}"))),
    ///     }
    /// }
    /// ```
    pub fn unavailable(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::with(FailureKind::Unavailable, &*error.into())
    }

    /// Poisons the delivery now: no retry can help, and a person decides. It is kept until it is replayed or discarded.
    ///
    /// ```
    /// # use wharf::{Failure, Message};
    /// async fn charge(amount: Message<u32>) -> Result<(), Failure> {
    ///     if amount.payload == 0 { Err(Failure::poison("the amount is 0")) } else { Ok(()) }
    /// }
    /// ```
    pub fn poison(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::with(FailureKind::Poison, &*error.into())
    }

    /// Runs the delivery again after `delay`, without consuming a retry.
    ///
    /// ```
    /// # use wharf::{Failure, Message, Raw};
    /// # use std::time::Duration;
    /// # async fn is_open() -> bool { true }
    /// async fn announce(order: Message<Raw>) -> Result<(), Failure> {
    ///     if !is_open().await {
    ///         return Err(Failure::snooze(Duration::from_secs(600))); // the shop is closed
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn snooze(delay: Duration) -> Self {
        Self { kind: FailureKind::Snooze(delay), error: String::new(), is_connection: false }
    }

    /// Finishes the delivery without having done anything, because the message needs no work. The reason is kept with
    /// the delivery, whose state is then `discarded`.
    ///
    /// ```
    /// # use wharf::{Failure, Message, Raw};
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    ///     if order.headers().get("test-order").is_some() {
    ///         return Err(Failure::discard("a test order"));
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn discard(reason: impl Into<String>) -> Self {
        Self { kind: FailureKind::Discard, error: reason.into(), is_connection: false }
    }

    /// The payload cannot be decoded, and never will be.
    pub(crate) fn undecodable(error: String) -> Self {
        Self { kind: FailureKind::Undecodable, error, is_connection: false }
    }

    /// The payload cannot be decoded now, because a dependency of the decoder is unavailable.
    pub(super) fn not_decodable_now(again_in: Duration, error: String) -> Self {
        Self { kind: FailureKind::NotDecodableNow(again_in), error, is_connection: false }
    }

    /// For a decoder that was not ready in time.
    pub(crate) fn decoder_too_slow(waited: Duration) -> Self {
        let error = format!("the decoder was not ready after {}", humantime::format_duration(waited));
        Self::not_decodable_now(waited, error)
    }

    /// The text is computed here: an error may not be `Clone`, and a failure of a batch call is copied for each
    /// message.
    fn with(kind: FailureKind, error: &(dyn StdError + 'static)) -> Self {
        Self { kind, error: chain(error), is_connection: is_connection(error) }
    }

    /// Whether a dependency of the handler is unavailable.
    pub(crate) fn is_unavailable(&self) -> bool {
        match self.kind {
            FailureKind::Unavailable => true,
            FailureKind::Retry | FailureKind::RetryAfter(_) => self.is_connection,
            FailureKind::Snooze(_)
            | FailureKind::Poison
            | FailureKind::Undecodable
            | FailureKind::NotDecodableNow(_)
            | FailureKind::Discard => false,
        }
    }
}

/// Any error, boxed or not, `anyhow::Error`, and text become a retry by the handler's policy.
impl<E: Into<Box<dyn StdError + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::retry(error)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)
    }
}

/// The error and its causes in one line. Uses `Display`, because a derived `Debug` may print fields with secrets.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        // Many errors already contain the text of their cause.
        if !text.ends_with(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}

/// Whether the error or one of its causes is a connection that was refused or lost.
fn is_connection(error: &(dyn StdError + 'static)) -> bool {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).any(|error| {
        matches!(
            error.kind(),
            ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                | ErrorKind::NotConnected
                | ErrorKind::BrokenPipe
                | ErrorKind::TimedOut
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_error_means_retry_and_keeps_its_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot charge the card")]
        struct Outer(#[source] std::num::ParseIntError);
        let failure = Failure::from(Outer("x".parse::<u8>().unwrap_err()));
        assert_eq!(failure.kind, FailureKind::Retry);
        assert_eq!(failure.error, "cannot charge the card: invalid digit found in string");
    }

    #[test]
    fn the_question_mark_converts_every_error_and_keeps_a_failure_unchanged() {
        fn said(answer: impl FnOnce() -> Result<(), Failure>) -> (FailureKind, String) {
            let failure = answer().unwrap_err();
            (failure.kind, failure.error)
        }
        let retried = |text: &str| (FailureKind::Retry, text.to_owned());
        assert_eq!(said(|| Ok(Err(std::fmt::Error)?)), retried("an error occurred when formatting an argument"));
        assert_eq!(said(|| Ok(Err("text")?)), retried("text"));
        assert_eq!(said(|| Ok(Err(String::from("text"))?)), retried("text"));
        assert_eq!(said(|| Ok(Err(Box::<dyn StdError + Send + Sync>::from("boxed"))?)), retried("boxed"));
        assert_eq!(said(|| Ok(Err(anyhow::anyhow!("cause").context("said first"))?)), retried("said first: cause"));
        let hopeless = said(|| {
            Err(Failure::poison("hopeless"))?;
            Ok(())
        });
        assert_eq!(hopeless, (FailureKind::Poison, "hopeless".to_owned()));
    }

    #[test]
    fn a_lost_connection_among_the_causes_means_unavailable() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot send the mail")]
        struct Send(#[source] io::Error);
        let lost = |kind: ErrorKind| Failure::from(Send(kind.into())).is_unavailable();
        assert!(lost(ErrorKind::ConnectionRefused) && lost(ErrorKind::TimedOut));
        assert!(!lost(ErrorKind::NotFound));
        let refused = || io::Error::from(ErrorKind::ConnectionRefused);
        assert!(Failure::from(refused()).is_unavailable());
        assert!(Failure::from(anyhow::Error::new(refused()).context("said first")).is_unavailable());
        assert!(Failure::retry_after(Duration::ZERO, refused()).is_unavailable());
        assert!(Failure::unavailable("away").is_unavailable() && !Failure::retry("no").is_unavailable());
        // The handler has decided what happens to the delivery.
        assert!(!Failure::poison(refused()).is_unavailable());
    }
}

//! A handler's answer when it is not done: retry, retry at a time of its own, unavailable, poison, snooze or discard.
//!
//! Any error becomes "retry" through `?`. The others are asked for by name. A failure is data, it never stops the engine.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, ErrorKind};
use std::time::Duration;

/// Why a handler did not finish, and what should become of the delivery.
///
/// ```
/// use wharf::Failure;
/// # use std::time::Duration;
/// async fn handle() -> Result<(), Failure> {
///     let number: u32 = "12".parse()?;               // any error: retried by the handler's policy
///     if number == 0 {
///         return Err(Failure::poison("zero is never right")); // hopeless: poisoned at once
///     }
///     if number > 100 {
///         return Err(Failure::snooze(Duration::from_secs(60))); // later, and no retry is spent
///     }
///     Ok(())
/// }
/// ```
///
/// `?` takes every error type: those that implement [`std::error::Error`], `Box<dyn Error + Send + Sync>`, `anyhow::Error`, and text.
/// `Failure` does not implement [`std::error::Error`] itself, so that all of these can become one.
#[derive(Clone)]
pub struct Failure {
    pub(crate) wish: Wish,
    pub(crate) error: String,
    /// A connection was refused or lost, as the error or one of its causes says.
    is_connection: bool,
}

/// What the handler wants to become of the delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// By the handler's retry policy.
    Retry,
    /// Counted as a failure, but at a time the handler named.
    RetryAfter(Duration),
    /// What the handler depends on is away. Without a breaker as [`Wish::Retry`].
    Unavailable,
    /// Later, nothing counted.
    Snooze(Duration),
    /// No retry can help.
    Poison,
    /// The payload is not what the handler's type says.
    Undecodable,
    /// Nothing to do, on purpose.
    Discard,
}

impl Failure {
    /// Retry by the handler's policy. `?` on any error does the same.
    pub fn retry(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::with(Wish::Retry, &*error.into())
    }

    /// Counts as a failure, but the next attempt is after `delay`, whatever the policy says (a `Retry-After` header, say).
    pub fn retry_after(delay: Duration, error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::with(Wish::RetryAfter(delay), &*error.into())
    }

    /// What the handler depends on is away: no delivery can succeed now, and this one is not to blame. With a
    /// [`breaker`](crate::Registration::breaker) it consumes no retry, and several in a row open the breaker. Without one, as
    /// [`Failure::retry`].
    ///
    /// ```
    /// use wharf::Failure;
    /// fn answer(status: u16) -> Result<(), Failure> {
    ///     match status {
    ///         200..=299 => Ok(()),
    ///         502..=504 => Err(Failure::unavailable(format!("the mail service answers {status}"))),
    ///         _ => Err(Failure::retry(format!("status {status}"))),
    ///     }
    /// }
    /// ```
    pub fn unavailable(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::with(Wish::Unavailable, &*error.into())
    }

    /// No retry can help: the delivery is poisoned now and kept for a person.
    pub fn poison(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::with(Wish::Poison, &*error.into())
    }

    /// Not now: run again after `delay`, without spending a retry.
    pub fn snooze(delay: Duration) -> Self {
        Self { wish: Wish::Snooze(delay), error: String::new(), is_connection: false }
    }

    /// Nothing needs to be done with this message; the reason is kept with the delivery, which is then finished.
    pub fn discard(reason: impl Into<String>) -> Self {
        Self { wish: Wish::Discard, error: reason.into(), is_connection: false }
    }

    pub(crate) fn undecodable(error: String) -> Self {
        Self { wish: Wish::Undecodable, error, is_connection: false }
    }

    fn with(wish: Wish, error: &(dyn StdError + 'static)) -> Self {
        Self { wish, error: chain(error), is_connection: is_connection(error) }
    }

    /// Whether it says that what the handler depends on is away.
    pub(crate) fn is_unavailable(&self) -> bool {
        match self.wish {
            Wish::Unavailable => true,
            Wish::Retry | Wish::RetryAfter(_) => self.is_connection,
            Wish::Snooze(_) | Wish::Poison | Wish::Undecodable | Wish::Discard => false,
        }
    }
}

/// Any error, boxed or not, `anyhow::Error`, and text: retried by the handler's policy.
impl<E: Into<Box<dyn StdError + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::retry(error)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.wish, self.error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)
    }
}

/// The error and its causes in one line. `Display`, never `Debug`: a derived `Debug` prints fields nobody meant to show.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        // Many errors already repeat their cause in their own text.
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
        assert_eq!(failure.wish, Wish::Retry);
        assert_eq!(failure.error, "cannot charge the card: invalid digit found in string");
    }

    #[test]
    fn the_question_mark_takes_every_kind_of_error_and_keeps_a_failure_as_it_is() {
        fn said(answer: impl FnOnce() -> Result<(), Failure>) -> (Wish, String) {
            let failure = answer().unwrap_err();
            (failure.wish, failure.error)
        }
        let retried = |text: &str| (Wish::Retry, text.to_owned());
        assert_eq!(said(|| Ok(Err(std::fmt::Error)?)), retried("an error occurred when formatting an argument"));
        assert_eq!(said(|| Ok(Err("text")?)), retried("text"));
        assert_eq!(said(|| Ok(Err(String::from("text"))?)), retried("text"));
        assert_eq!(said(|| Ok(Err(Box::<dyn StdError + Send + Sync>::from("boxed"))?)), retried("boxed"));
        assert_eq!(said(|| Ok(Err(anyhow::anyhow!("cause").context("said first"))?)), retried("said first: cause"));
        let hopeless = said(|| {
            Err(Failure::poison("hopeless"))?;
            Ok(())
        });
        assert_eq!(hopeless, (Wish::Poison, "hopeless".to_owned()));
    }

    #[test]
    fn a_lost_connection_is_found_among_the_causes_and_says_that_something_is_away() {
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
        // The handler has said what is to become of the delivery.
        assert!(!Failure::poison(refused()).is_unavailable());
    }
}

//! The one error of the public API: what was being done, to what, and the cause in `source()`.
//!
//! Users call methods such as `is_transient` and `is_configuration` and never parse the text. An error contains no
//! secret and no payload: database URLs are reduced to host, port and database before they get here.

use std::error::Error as StdError;
use std::fmt;

/// An error of Wharf itself. A handler's failure is not an `Error` but an outcome of its delivery.
///
/// ```
/// # async fn example(inbox: wharf::Inbox<wharf::Postgres>, record: wharf::Record) -> u16 {
/// match inbox.accept(record).await {
///     Ok(_) => 202,
///     Err(error) if error.is_refused() => 422,   // the record is wrong: the same call fails again
///     Err(error) if error.is_transient() => 503, // the caller may try again
///     Err(_) => 500,
/// }
/// # }
/// ```
///
/// `{}` prints the error alone and leaves its causes to `source()`; `{:#}` prints the causes as well:
///
/// ```
/// let error = wharf::Limits::default().set("lease", "soon").unwrap_err();
/// assert!(error.to_string().starts_with("cannot set lease to \"soon\""));
/// assert!(format!("{error:#}").contains("expected number"));
/// ```
#[derive(Debug)]
pub struct Error {
    /// What the methods `is_..` distinguish.
    kind: Kind,
    /// What was being done, and to what.
    context: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of Wharf's own calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kinds of errors. Retries depend on them, so a new kind needs a decision wherever they are matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The program or its configuration is wrong. Only changing it helps.
    Configuration,
    /// The database's schema is not the one this build knows.
    Schema,
    /// The connection to the database was lost or could not be established.
    Connection,
    /// The server refused for a transient reason: a serialization conflict, a read-only standby.
    Passing,
    /// The server refused for a reason that diesel does not identify: a lock, a timeout, a full disk, or possibly the
    /// values.
    Server,
    /// The server refused because of the values in the statement (SQLSTATE class 23).
    Data,
    /// A record cannot become a message.
    Refused,
    /// The inbox is stopping or has stopped.
    Stopped,
    /// An invariant does not hold: a bug in Wharf.
    Bug,
}

impl Error {
    pub(crate) fn new(kind: Kind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    pub(crate) fn configuration(context: impl Into<String>) -> Self {
        Self::new(Kind::Configuration, context)
    }

    pub(crate) fn refused(context: impl Into<String>) -> Self {
        Self::new(Kind::Refused, context)
    }

    pub(crate) fn stopped(context: impl Into<String>) -> Self {
        Self::new(Kind::Stopped, context)
    }

    /// An invariant does not hold. `context` names it.
    pub(crate) fn bug(context: impl Into<String>) -> Self {
        Self::new(Kind::Bug, context)
    }

    /// Sets the cause.
    pub(crate) fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// A copy of the error, for several callers that wait for one statement. Its causes become text.
    pub(crate) fn repeat(&self) -> Self {
        Self::new(self.kind, format!("{self:#}"))
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// True when the same call may succeed later: the database was unreachable, restarting, locked or overloaded.
    ///
    /// ```
    /// // The status of an HTTP endpoint that accepts a message.
    /// fn status(error: &wharf::Error) -> u16 {
    ///     match error {
    ///         error if error.is_transient() => 503,
    ///         error if error.is_refused() => 422,
    ///         _ => 500,
    ///     }
    /// }
    /// ```
    pub fn is_transient(&self) -> bool {
        matches!(self.kind, Kind::Connection | Kind::Passing | Kind::Server)
    }

    /// True when the connection itself failed, so that it is unknown whether the statement took effect.
    pub fn is_connection(&self) -> bool {
        self.kind == Kind::Connection
    }

    /// True when the program or its configuration must be changed: duplicate keys, an invalid URL, a limit of zero.
    pub fn is_configuration(&self) -> bool {
        self.kind == Kind::Configuration
    }

    /// True when the database's schema is missing, older or newer than this build knows.
    pub fn is_schema(&self) -> bool {
        self.kind == Kind::Schema
    }

    /// True when a record that was passed to [`Inbox::accept`](crate::Inbox::accept) cannot become a message: it has no
    /// identity, is too large, or its identity belongs to a message with another payload. A retry gives the same error.
    pub fn is_refused(&self) -> bool {
        self.kind == Kind::Refused
    }

    /// True when the inbox was stopping or had stopped.
    pub fn is_stopped(&self) -> bool {
        self.kind == Kind::Stopped
    }

    /// True when an invariant of Wharf does not hold. This is a bug; please report it.
    pub fn is_bug(&self) -> bool {
        self.kind == Kind::Bug
    }
}

impl fmt::Display for Error {
    /// Writes what was being done, and to what. Causes are in `source()`, as error reporters expect; `{:#}` writes them
    /// too, in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)?;
        let mut cause = if f.alternate() { self.source() } else { None };
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_the_chain_has_each_cause_once() {
        let error = Error::configuration("cannot open the file").with_source(std::fmt::Error);
        let mut chain = vec![error.to_string()];
        let mut cause = error.source();
        while let Some(error) = cause {
            chain.push(error.to_string());
            cause = error.source();
        }
        let cause = std::fmt::Error.to_string();
        assert_eq!(chain, ["cannot open the file".to_owned(), cause.clone()]);
        assert_eq!(format!("{error:#}"), format!("cannot open the file: {cause}"));
        assert_eq!(error.repeat().to_string(), format!("{error:#}"));
    }
}

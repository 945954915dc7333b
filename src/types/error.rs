//! The one error of the public API: what was being done, to what, and the cause in `source()`.
//!
//! Users ask it questions (`is_transient`, `is_configuration`), they never parse its text. No secret and no payload is
//! ever part of it: database URLs are reduced to host, port and database before they get here.

use std::error::Error as StdError;
use std::fmt;

/// What went wrong in Wharf itself, never what went wrong in a handler (that is an outcome).
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
    kind: Kind,
    context: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of Wharf's own calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The program was put together wrongly: nothing helps but changing it.
    Configuration,
    /// The database's schema is not the one this build knows.
    Schema,
    /// The connection to the database is gone or could not be made.
    Connection,
    /// The server refused for a reason that surely passes: a serialization conflict, a read-only standby.
    Passing,
    /// The server refused for a reason that diesel cannot name: a lock, a time-out, a full disk, or the values after all.
    Server,
    /// The server refused because of the values in the statement (SQLSTATE class 23).
    Data,
    /// A record that was handed in cannot become a message.
    Refused,
    /// The inbox is stopping or has stopped.
    Stopped,
    /// Something that must hold does not: a mistake in Wharf itself.
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

    /// Something that must hold does not. `context` names it.
    pub(crate) fn bug(context: impl Into<String>) -> Self {
        Self::new(Kind::Bug, context)
    }

    pub(crate) fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The same error once more, for several callers that wait for one statement. Its causes become text.
    pub(crate) fn repeat(&self) -> Self {
        Self::new(self.kind, format!("{self:#}"))
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// True when the same call may succeed later: the database was away, restarting, locked or overloaded.
    pub fn is_transient(&self) -> bool {
        matches!(self.kind, Kind::Connection | Kind::Passing | Kind::Server)
    }

    /// True when the connection itself failed, so that it is unknown whether the statement took effect.
    pub fn is_connection(&self) -> bool {
        self.kind == Kind::Connection
    }

    /// True when the program has to be changed: duplicate keys, an unusable URL, a limit of zero.
    pub fn is_configuration(&self) -> bool {
        self.kind == Kind::Configuration
    }

    /// True when the database's schema is missing, older or newer than this build knows.
    pub fn is_schema(&self) -> bool {
        self.kind == Kind::Schema
    }

    /// True when a record that was given to [`Inbox::accept`](crate::Inbox::accept) cannot become a message: it has no identity, is too
    /// large, or its identity belongs to a message with another payload. Trying again changes nothing.
    pub fn is_refused(&self) -> bool {
        self.kind == Kind::Refused
    }

    /// True when the inbox was stopping or had stopped.
    pub fn is_stopped(&self) -> bool {
        self.kind == Kind::Stopped
    }

    /// True when Wharf itself is wrong: something that must always hold did not. Please report it.
    pub fn is_bug(&self) -> bool {
        self.kind == Kind::Bug
    }
}

impl fmt::Display for Error {
    /// What was being done, and to what. Causes are in `source()`, as reporters of errors expect; `{:#}` writes them too, in one line.
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
    fn a_report_of_the_chain_says_each_cause_once() {
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

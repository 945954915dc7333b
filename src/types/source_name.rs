//! The name and the consumer group of a source of records. Events, health reasons and errors show both.

use std::fmt;
use std::sync::Arc;

/// Identifies a source within an inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceName {
    /// Unique within an inbox. The consumer group's name, unless the service gives another.
    pub(crate) name: Arc<str>,
    pub(crate) group: Arc<str>,
}

impl fmt::Display for SourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name == self.group {
            true => write!(f, "group {}", self.group),
            false => write!(f, "source {} (group {})", self.name, self.group),
        }
    }
}

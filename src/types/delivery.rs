//! A delivery as a test sees it.

use std::time::Duration;

use super::filter::State;

/// What became of a delivery so far.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivery {
    /// Where it stands.
    pub state: State,
    /// How often it was started.
    pub attempts: u32,
    /// How often its handler failed, since it was accepted or replayed.
    pub errors: u32,
    /// How often in a row its process died.
    pub crashes: u32,
    /// When it is due, from now; zero when it is, or has ended.
    pub due_in: Duration,
    /// Why it was poisoned or discarded.
    pub reason: Option<String>,
    /// What its handler said last.
    pub last_error: Option<String>,
}

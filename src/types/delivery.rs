//! A delivery as the test kit returns it.

use std::time::Duration;

use super::filter::State;

/// The state of a delivery. [`TestInbox::delivery`](crate::testing::TestInbox::delivery) returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivery {
    /// The state.
    pub state: State,
    /// The number of attempts.
    pub attempts: u32,
    /// The number of failures since it was accepted or replayed.
    pub errors: u32,
    /// The number of process crashes in a row.
    pub crashes: u32,
    /// The time until it is due; zero when it is due or finished.
    pub due_in: Duration,
    /// The reason for which it was poisoned or discarded.
    pub reason: Option<String>,
    /// The last error of its handler.
    pub last_error: Option<String>,
}

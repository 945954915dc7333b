//! What can be seen from outside: every decision as one `tracing` event (`events.rs`), and as a count (`counts.rs`).

pub(crate) mod counts;
pub(crate) mod events;

//! How long the claim loop waits for a notification. Pure: the times are arguments.
//!
//! A deadline says when a round can do more than the last one. If it had passed when the last round began, that round
//! could not use it: the handler has no free slot, say. Another round could not either, so the loop waits until a slot
//! is free. Otherwise it would claim again and again, about a thousand times a second.

use std::time::{Duration, Instant};

/// How long to wait: until the first deadline that lies after the beginning of the last round, at most `poll`.
pub(super) fn patience(
    deadlines: impl Iterator<Item = Instant>,
    poll: Duration,
    round_began_at: Instant,
    now: Instant,
) -> Duration {
    let ahead = deadlines.filter(|at| *at > round_began_at);
    ahead.map(|at| at.saturating_duration_since(now)).fold(poll, Duration::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: Duration = Duration::from_secs(1);
    const TICK: Duration = Duration::from_millis(10);

    #[test]
    fn a_deadline_that_the_last_round_could_not_use_does_not_cause_another_round() {
        let began_at = Instant::now() + POLL;
        let now = began_at + TICK;
        let wait = |deadlines: &[Instant]| patience(deadlines.iter().copied(), POLL, began_at, now);
        assert_eq!(wait(&[]), POLL);
        assert_eq!(wait(&[began_at - TICK, began_at]), POLL);
        assert_eq!(wait(&[began_at, now + TICK * 2, now + TICK * 3]), TICK * 2);
    }

    #[test]
    fn a_deadline_that_passed_during_the_last_round_causes_another_one_at_once() {
        let began_at = Instant::now();
        let passed = began_at + TICK;
        assert_eq!(patience([passed].into_iter(), POLL, began_at, passed + TICK), Duration::ZERO);
    }
}

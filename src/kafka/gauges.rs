//! Gauges of the partitions that a process reads: the records that are not stored yet, the age of the oldest one, and
//! the states of partitions.
//!
//! Uses the state of the ingest and the watermarks of the last fetch, and asks no broker. Revoked partitions are set to
//! 0, because the process that reads them now has its own values.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::assigned::{TopicPartition, Watched};
use crate::telemetry::shares::Share;
use crate::telemetry::table;

/// The most points that are kept for a partition while its records wait to be stored. Beyond it, a new point replaces
/// the newest one.
const POINTS_MAX: usize = 1_000;

/// The gauges of one source.
pub(super) struct Gauges {
    source: Arc<str>,
    /// This source's share of gauges that several sources of a process add up to.
    share: Share,
    /// The partitions of the last call of `set`.
    partitions: HashMap<TopicPartition, Behind>,
}

impl Gauges {
    pub(super) fn new(source: &Arc<str>) -> Self {
        Self { source: Arc::clone(source), share: Share::new(), partitions: HashMap::new() }
    }

    /// Sets the gauges of these partitions, each with the number of records that are not stored, if it is known.
    pub(super) fn set(&mut self, watched: &[Watched], lags: &[Option<i64>]) {
        let (now, clock) = (Instant::now(), SystemTime::now());
        let mut before = std::mem::take(&mut self.partitions);
        for (one, lag) in watched.iter().zip(lags) {
            let mut behind = before.remove(&one.place).unwrap_or_else(|| Behind::new(now));
            behind.note((one.expected, one.newest), one.stored);
            if let Some(lag) = *lag {
                self.set_lag(&one.place, lag, behind.lasts(lag, now, clock));
            }
            self.partitions.insert(one.place.clone(), behind);
        }
        before.keys().for_each(|place| self.set_lag(place, 0, Duration::ZERO));
        for state in table::KAFKA_PARTITIONS.values {
            let count = watched.iter().filter(|one| one.state == *state).count();
            self.share.set(&table::KAFKA_PARTITIONS, &[&self.source, state], count as f64);
        }
    }

    fn set_lag(&self, (topic, partition): &TopicPartition, records: i64, lasts: Duration) {
        let partition = partition.to_string();
        let of = [&*self.source, &**topic, &*partition];
        self.share.set(&table::KAFKA_LAG, &of, records as f64);
        self.share.set(&table::KAFKA_LAG_SECONDS, &of, lasts.as_secs_f64());
    }
}

impl Drop for Gauges {
    /// Sets all gauges to 0 when the ingest ends.
    fn drop(&mut self) {
        self.set(&[], &[]);
    }
}

/// How far the stored records of a partition are behind its log, as a duration.
struct Behind {
    /// When everything was last stored, or when reading began.
    complete_at: Instant,
    /// The timestamp of the newest stored record, as far as known.
    stored: Option<SystemTime>,
    /// Earlier read positions, each with the newest timestamp that was read by then; the oldest first.
    points: VecDeque<(i64, SystemTime)>,
}

impl Behind {
    fn new(now: Instant) -> Self {
        Self { complete_at: now, stored: None, points: VecDeque::new() }
    }

    /// Records the position and newest timestamp that were read, and how far the partition is stored.
    fn note(&mut self, read: (i64, Option<SystemTime>), stored: Option<i64>) {
        if let (offset, Some(newest)) = read
            && self.points.back().is_none_or(|(last, _)| *last != offset)
        {
            self.points.truncate(POINTS_MAX - 1);
            self.points.push_back((offset, newest));
        }
        while let Some((offset, newest)) = self.points.front().copied()
            && stored.is_some_and(|stored| stored >= offset)
        {
            self.stored = Some(newest);
            self.points.pop_front();
        }
    }

    /// The longest time that a record may be waiting. Missing records were written after the last moment at which
    /// everything was stored, and after the newest stored record, so the shorter of the two times is used.
    fn lasts(&mut self, lag: i64, now: Instant, clock: SystemTime) -> Duration {
        if lag == 0 {
            self.complete_at = now;
            return Duration::ZERO;
        }
        let incomplete_for = now.saturating_duration_since(self.complete_at);
        match self.stored {
            // Before anything was stored, the log may be much older than this process.
            None => incomplete_for,
            Some(stored) => incomplete_for.min(clock.duration_since(stored).unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_partition_that_has_stored_everything_is_not_behind() {
        let (now, clock) = (Instant::now(), SystemTime::now());
        let mut behind = Behind::new(now);
        assert_eq!(behind.lasts(0, now + MINUTE, clock + MINUTE), Duration::ZERO);
        assert_eq!(behind.lasts(7, now + 2 * MINUTE, clock + 2 * MINUTE), MINUTE);
    }

    #[test]
    fn a_partition_that_is_always_behind_is_as_old_as_what_it_has_stored() {
        let (now, clock) = (Instant::now(), SystemTime::now());
        let mut behind = Behind::new(now);
        behind.points.extend([(10, clock), (20, clock + MINUTE)]);
        let read = (20, Some(clock + MINUTE));
        behind.note(read, Some(10));
        assert_eq!(behind.lasts(7, now + 3 * MINUTE, clock + 3 * MINUTE), 3 * MINUTE);
        behind.note(read, Some(20));
        assert_eq!(behind.lasts(7, now + 3 * MINUTE, clock + 3 * MINUTE), 2 * MINUTE);
    }
}

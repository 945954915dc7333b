//! How much of the claim index the next claim scans. Pure: the time is an argument.
//!
//! Finished deliveries leave the index only when vacuum removes them, or a scan marks them once no snapshot needs them
//! any more. A scan from the beginning passes over each of them. So most scans begin at the floor: where the last claim
//! ended. A scan that found less than it asked for is followed by near scans, from a little below the floor, which find
//! deliveries of transactions that committed late: first as far below as an accept usually takes, then further.
//! Everything else below the floor (released deliveries, those of a crashed process) is found by deep scans, from the
//! beginning. Near and deep scans take a bounded share of the time, so that a handler with a high rate does not pass
//! over the deliveries of the last seconds with each claim. A deep scan that fails, most likely with the server's
//! `statement_timeout`, is repeated less deep.

use std::time::{Duration, Instant};

/// Near scans: how far below the floor each begins, and the pause before it is repeated as a multiple of its duration.
const NEAR: [(Duration, u32); 2] = [(Duration::from_millis(50), 4), (Duration::from_secs(2), 20)];
/// How far below the floor deep scans begin; `None`: at the beginning. Each failure selects the next entry, each quick
/// success the previous one.
const DEPTHS: [Option<Duration>; 4] =
    [None, Some(Duration::from_secs(6 * 3_600)), Some(Duration::from_secs(600)), Some(Duration::from_secs(30))];
/// The minimum and maximum time between deep scans.
const DEEP_EVERY: Duration = Duration::from_millis(250);
const DEEP_EVERY_MAX: Duration = Duration::from_secs(60);
/// After a deep scan, the next one waits this many times as long as it took.
const DEEP_SHARE: u32 = 20;
/// After a deep scan that took no longer than this, the next one may go deeper.
const QUICK: Duration = Duration::from_secs(1);

/// Where a round's claims begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    /// This far below the floor; `None`: at the beginning.
    Deep(Option<Duration>),
    /// The index into [`NEAR`].
    Near(usize),
    /// At the floor.
    Floor,
}

impl Scan {
    /// How far below the floor it begins; `None`: at the beginning.
    pub(super) fn depth(self) -> Option<Duration> {
        match self {
            Self::Deep(depth) => depth,
            Self::Near(step) => NEAR.get(step).map(|(depth, _)| *depth),
            Self::Floor => Some(Duration::ZERO),
        }
    }
}

/// The state that decides the next scan.
#[derive(Debug, Default)]
pub(super) struct Scans {
    /// When the next deep scan is due; `None`: now.
    deep_at: Option<Instant>,
    /// The index into [`DEPTHS`].
    depth: usize,
    /// The near scan that comes next, because the last scan found too little.
    near: Option<usize>,
    /// When each near scan may be repeated; `None`: at once.
    near_at: [Option<Instant>; NEAR.len()],
    /// Deliveries may be below the floor that only a deep scan finds.
    is_deep_owed: bool,
}

impl Scans {
    /// The scan of the next claim: a deep one if it is due, else a near one if the last scan found too little.
    pub(super) fn next(&self, now: Instant) -> Scan {
        match self.deep_at {
            Some(at) if now < at => match self.near {
                Some(step) if self.near_at[step].is_none_or(|at| at <= now) => Scan::Near(step),
                Some(_) | None => Scan::Floor,
            },
            Some(_) | None => Scan::Deep(DEPTHS[self.depth]),
        }
    }

    /// Makes the next scan a deep one.
    pub(super) fn scan_from_beginning(&mut self) {
        self.deep_at = None;
    }

    /// Records a scan that the database answered, and how long it took.
    pub(super) fn answered(&mut self, scan: Scan, took: Duration, now: Instant) {
        match scan {
            Scan::Deep(depth) => {
                self.is_deep_owed = depth.is_some();
                self.deep_at = Some(now + pause_after(took));
                if took <= QUICK {
                    self.depth = self.depth.saturating_sub(1);
                }
            }
            Scan::Near(step) => self.near_at[step] = Some(now + took * NEAR[step].1),
            Scan::Floor => {}
        }
        self.near = None;
    }

    /// Records a scan that failed, and how long it took.
    pub(super) fn refused(&mut self, scan: Scan, took: Duration, now: Instant) {
        match scan {
            Scan::Deep(_) => {
                self.is_deep_owed = true;
                self.deep_at = Some(now + pause_after(took));
                self.depth = (self.depth + 1).min(DEPTHS.len() - 1);
            }
            Scan::Near(_) | Scan::Floor => {}
        }
        self.near = None;
    }

    /// Records that a scan found less than it asked for. Returns whether another one makes sense at once.
    pub(super) fn fell_short(&mut self, scan: Scan, now: Instant) -> bool {
        self.near = match scan {
            Scan::Floor => {
                self.is_deep_owed = true;
                Some(0)
            }
            Scan::Near(step) => Some(step + 1).filter(|next| *next < NEAR.len()),
            Scan::Deep(_) => None,
        };
        matches!(self.next(now), Scan::Near(_))
    }

    /// Whether the last scan found too little, and a near one follows.
    pub(super) fn is_near_owed(&self) -> bool {
        self.near.is_some()
    }

    /// When the next near or deep scan is due, if one is needed.
    pub(super) fn owed_at(&self) -> Option<Instant> {
        let near_at = self.near.and_then(|step| self.near_at[step]);
        self.deep_at.filter(|_| self.is_deep_owed).into_iter().chain(near_at).min()
    }
}

/// How long to wait after a deep scan that took this long, so that deep scans keep to their share of the time.
fn pause_after(took: Duration) -> Duration {
    (took * DEEP_SHARE).clamp(DEEP_EVERY, DEEP_EVERY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICKLY: Duration = Duration::from_millis(1);

    /// The state after a deep scan that was quick and complete.
    fn settled(now: Instant) -> Scans {
        let mut scans = Scans::default();
        assert_eq!(scans.next(now), Scan::Deep(None));
        scans.answered(Scan::Deep(None), QUICKLY, now);
        scans
    }

    #[test]
    fn a_scan_that_finds_too_little_is_followed_by_near_ones_and_a_deep_one_is_owed() {
        let now = Instant::now();
        let mut scans = settled(now);
        assert_eq!((scans.next(now), scans.owed_at()), (Scan::Floor, None));
        assert!(scans.fell_short(Scan::Floor, now));
        for step in 0..NEAR.len() {
            assert_eq!(scans.next(now), Scan::Near(step));
            scans.answered(Scan::Near(step), QUICKLY, now);
            assert_eq!(scans.fell_short(Scan::Near(step), now), step + 1 < NEAR.len());
        }
        assert_eq!((scans.next(now), scans.owed_at()), (Scan::Floor, Some(now + DEEP_EVERY)));
        assert_eq!(scans.next(now + DEEP_EVERY), Scan::Deep(None));
        scans.answered(Scan::Deep(None), QUICKLY, now + DEEP_EVERY);
        assert_eq!(scans.owed_at(), None);
    }

    #[test]
    fn near_scans_take_no_more_than_their_share_of_the_time_and_are_owed_until_then() {
        let now = Instant::now();
        let mut scans = settled(now);
        let took = Duration::from_millis(5);
        scans.answered(Scan::Near(0), took, now);
        assert!(!scans.fell_short(Scan::Floor, now));
        let again_at = now + took * NEAR[0].1;
        assert_eq!((scans.next(now), scans.owed_at()), (Scan::Floor, Some(again_at)));
        assert_eq!(scans.next(again_at), Scan::Near(0));
    }

    #[test]
    fn a_claim_that_finds_enough_owes_no_near_scan() {
        let now = Instant::now();
        let mut scans = settled(now);
        scans.fell_short(Scan::Floor, now);
        scans.answered(Scan::Floor, QUICKLY, now);
        assert_eq!(scans.next(now), Scan::Floor);
    }

    #[test]
    fn deep_scans_take_no_more_than_their_share_of_the_time() {
        let now = Instant::now();
        let mut scans = settled(now);
        scans.answered(Scan::Deep(None), Duration::from_secs(1), now);
        let later = now + Duration::from_millis(19_999);
        assert_eq!((scans.next(later), scans.next(now + Duration::from_secs(20))), (Scan::Floor, Scan::Deep(None)));
        scans.answered(Scan::Deep(None), Duration::from_secs(30), now);
        assert_eq!(scans.next(now + DEEP_EVERY_MAX), Scan::Deep(None));
    }

    #[test]
    fn a_deep_scan_that_is_refused_is_tried_less_deep_and_ordinary_ones_go_on_meanwhile() {
        let now = Instant::now();
        let mut scans = settled(now);
        for depth in [DEPTHS[1], DEPTHS[2], DEPTHS[3], DEPTHS[3]] {
            scans.scan_from_beginning();
            scans.refused(scans.next(now), Duration::from_secs(10), now);
            assert_eq!((scans.next(now), scans.next(now + DEEP_EVERY_MAX)), (Scan::Floor, Scan::Deep(depth)));
            assert_eq!(scans.owed_at(), Some(now + DEEP_EVERY_MAX));
        }
        for depth in [DEPTHS[2], DEPTHS[1], None, None] {
            scans.answered(scans.next(now + DEEP_EVERY_MAX), QUICKLY, now);
            assert_eq!(scans.next(now + DEEP_EVERY_MAX), Scan::Deep(depth));
        }
        assert_eq!(scans.owed_at(), None);
    }
}

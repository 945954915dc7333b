//! How much of the claim index the next claim looks at. Pure: the time is an argument.
//!
//! Finished deliveries leave the index only when the server may clean it up. A snapshot that somebody holds open keeps them there, and a
//! look from the beginning passes over each of them. So most looks begin at the floor: where the last claim ended. A look that found less
//! than it asked for is followed by one from shortly below the floor, where a transaction that committed late puts its deliveries.
//! Everything else below the floor (given back, left by a process that crashed) is found by deep looks, from the beginning. Deep looks take
//! at most a twentieth of the time. One that fails, most likely at the server's `statement_timeout`, is tried again less deep.

use std::time::{Duration, Instant};

/// How far below the floor a look begins that follows one which found too little.
const NEAR: Duration = Duration::from_secs(2);
/// How far below the floor deep looks begin; `None`: at the beginning. Each failure takes the next one, each quick success the one before.
const DEPTHS: [Option<Duration>; 4] =
    [None, Some(Duration::from_secs(6 * 3_600)), Some(Duration::from_secs(600)), Some(Duration::from_secs(30))];
/// Deep looks are at least this far apart, and at most.
const DEEP_EVERY: Duration = Duration::from_millis(250);
const DEEP_EVERY_MAX: Duration = Duration::from_secs(60);
/// The share of the time that deep looks may take: one in so many.
const DEEP_SHARE: u32 = 20;
/// A deep look that took no longer may go deeper the next time.
const QUICK: Duration = Duration::from_secs(1);

/// Where a round's claims begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// So far below the floor; `None`: at the beginning.
    Deep(Option<Duration>),
    Near,
    Floor,
}

impl Look {
    /// How far below the floor it begins; `None`: at the beginning.
    pub(super) fn depth(self) -> Option<Duration> {
        match self {
            Self::Deep(depth) => depth,
            Self::Near => Some(NEAR),
            Self::Floor => Some(Duration::ZERO),
        }
    }
}

/// What is known of the looks so far.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// When the next deep look is due; `None`: now.
    deep_at: Option<Instant>,
    /// The place in [`DEPTHS`].
    depth: usize,
    /// The last look was from the floor and found too little.
    is_near_next: bool,
    /// Something may stand below the floor that only a deep look finds.
    is_deep_owed: bool,
}

impl Looks {
    pub(super) fn next(&self, now: Instant) -> Look {
        match self.deep_at {
            Some(at) if now < at => match self.is_near_next {
                true => Look::Near,
                false => Look::Floor,
            },
            Some(_) | None => Look::Deep(DEPTHS[self.depth]),
        }
    }

    /// The next look is deep.
    pub(super) fn look_anew(&mut self) {
        self.deep_at = None;
    }

    /// Notes a look that the database answered, and how long that took.
    pub(super) fn answered(&mut self, look: Look, took: Duration, now: Instant) {
        match look {
            Look::Deep(depth) => {
                self.is_deep_owed = depth.is_some();
                self.deep_at = Some(now + pause_after(took));
                if took <= QUICK {
                    self.depth = self.depth.saturating_sub(1);
                }
            }
            Look::Near | Look::Floor => {}
        }
        self.is_near_next = false;
    }

    /// Notes a look that the database refused, and how long that took.
    pub(super) fn refused(&mut self, look: Look, took: Duration, now: Instant) {
        match look {
            Look::Deep(_) => {
                self.is_deep_owed = true;
                self.deep_at = Some(now + pause_after(took));
                self.depth = (self.depth + 1).min(DEPTHS.len() - 1);
            }
            Look::Near | Look::Floor => {}
        }
        self.is_near_next = false;
    }

    /// Notes that a look found less than it asked for; returns whether another one makes sense at once.
    pub(super) fn fell_short(&mut self, look: Look) -> bool {
        match look {
            Look::Floor => {
                self.is_deep_owed = true;
                self.is_near_next = true;
            }
            Look::Near | Look::Deep(_) => self.is_near_next = false,
        }
        self.is_near_next
    }

    /// When a look is due that nobody has to ask for.
    pub(super) fn owed_at(&self) -> Option<Instant> {
        self.deep_at.filter(|_| self.is_deep_owed)
    }
}

fn pause_after(took: Duration) -> Duration {
    (took * DEEP_SHARE).clamp(DEEP_EVERY, DEEP_EVERY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICKLY: Duration = Duration::from_millis(1);

    /// Looks whose last deep look was quick and complete.
    fn settled(now: Instant) -> Looks {
        let mut looks = Looks::default();
        assert_eq!(looks.next(now), Look::Deep(None));
        looks.answered(Look::Deep(None), QUICKLY, now);
        looks
    }

    #[test]
    fn a_look_that_finds_too_little_is_followed_by_a_near_one_and_a_deep_one_is_owed() {
        let now = Instant::now();
        let mut looks = settled(now);
        assert_eq!((looks.next(now), looks.owed_at()), (Look::Floor, None));
        assert!(looks.fell_short(Look::Floor));
        assert_eq!(looks.next(now), Look::Near);
        looks.answered(Look::Near, QUICKLY, now);
        assert!(!looks.fell_short(Look::Near));
        assert_eq!((looks.next(now), looks.owed_at()), (Look::Floor, Some(now + DEEP_EVERY)));
        assert_eq!(looks.next(now + DEEP_EVERY), Look::Deep(None));
        looks.answered(Look::Deep(None), QUICKLY, now + DEEP_EVERY);
        assert_eq!(looks.owed_at(), None);
    }

    #[test]
    fn deep_looks_take_no_more_than_their_share_of_the_time() {
        let now = Instant::now();
        let mut looks = settled(now);
        looks.answered(Look::Deep(None), Duration::from_secs(1), now);
        let later = now + Duration::from_millis(19_999);
        assert_eq!((looks.next(later), looks.next(now + Duration::from_secs(20))), (Look::Floor, Look::Deep(None)));
        looks.answered(Look::Deep(None), Duration::from_secs(30), now);
        assert_eq!(looks.next(now + DEEP_EVERY_MAX), Look::Deep(None));
    }

    #[test]
    fn a_deep_look_that_is_refused_is_tried_less_deep_and_ordinary_ones_go_on_meanwhile() {
        let now = Instant::now();
        let mut looks = settled(now);
        for depth in [DEPTHS[1], DEPTHS[2], DEPTHS[3], DEPTHS[3]] {
            looks.look_anew();
            looks.refused(looks.next(now), Duration::from_secs(10), now);
            assert_eq!((looks.next(now), looks.next(now + DEEP_EVERY_MAX)), (Look::Floor, Look::Deep(depth)));
            assert_eq!(looks.owed_at(), Some(now + DEEP_EVERY_MAX));
        }
        for depth in [DEPTHS[2], DEPTHS[1], None, None] {
            looks.answered(looks.next(now + DEEP_EVERY_MAX), QUICKLY, now);
            assert_eq!(looks.next(now + DEEP_EVERY_MAX), Look::Deep(depth));
        }
        assert_eq!(looks.owed_at(), None);
    }
}

//! Permits: limit how many transactional handlers may hold a connection of a store at a time, and divide them among the
//! handlers.
//!
//! A run takes its permit when it begins; deliveries that wait in memory hold none. Each transactional handler has a
//! share that the others cannot take: half of the permits are divided by the weights of the handlers, the rest is first
//! come, first served. So a slow handler can use most of the connections while no other handler needs them, but it
//! cannot take the shares of the others. With fewer permits than handlers there are no shares; then a handler without a
//! permit asks, and the next one that is returned is kept for it. All inboxes on a store share its permits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The permits of one store.
pub(crate) struct Permits {
    total: usize,
    /// A std mutex: nothing awaits while holding it.
    shares: Mutex<Shares>,
    /// Notified when permits are returned.
    pub(crate) returned: Notify,
}

/// What the mutex protects.
#[derive(Default)]
struct Shares {
    /// The id of the next handler. Ids are never reused, so a permit that outlives its handler is not credited to
    /// another.
    next_id: u64,
    /// By handler.
    held: HashMap<u64, Holding>,
    /// Handlers without a permit that ask for one, the first one first.
    asking: Vec<u64>,
}

impl Shares {
    /// How many permits nobody holds.
    fn unheld(&self, total: usize) -> usize {
        total.saturating_sub(self.held.values().map(|holding| holding.held).sum())
    }

    /// How many handlers are served before this one.
    fn asking_before(&self, id: u64) -> usize {
        self.asking.iter().position(|asking| *asking == id).unwrap_or(self.asking.len())
    }
}

/// How many permits a handler holds, and what its share is measured by.
#[derive(Debug, Clone, Copy)]
struct Holding {
    held: usize,
    /// The handler's part of the half that is divided.
    weight: usize,
}

impl Permits {
    pub(super) fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total, shares: Mutex::default(), returned: Notify::new() })
    }

    /// Reserves a share for one more handler, until the returned value is dropped.
    pub(crate) fn share(self: &Arc<Self>, weight: usize) -> Share {
        let mut shares = self.lock();
        let id = shares.next_id;
        shares.next_id += 1;
        shares.held.insert(id, Holding { held: 0, weight: weight.max(1) });
        Share { permits: Arc::clone(self), id }
    }

    fn lock(&self) -> MutexGuard<'_, Shares> {
        // No code under the lock can panic; if it did, the counts would still be consistent.
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The share of one handler.
pub(crate) struct Share {
    permits: Arc<Permits>,
    id: u64,
}

impl Share {
    /// How many permits this handler could take now.
    pub(crate) fn free(&self) -> usize {
        let shares = self.permits.lock();
        let Some(own) = shares.held.get(&self.id).copied() else { return 0 };
        self.available(&shares, own)
    }

    /// Takes permits that are free for this handler, at most `max` and at least one.
    pub(crate) fn take(&self, max: usize) -> Option<Permit> {
        let mut shares = self.permits.lock();
        let own = shares.held.get(&self.id).copied()?;
        let count = self.available(&shares, own).min(max);
        if count == 0 {
            return None;
        }
        shares.asking.retain(|id| *id != self.id);
        shares.held.insert(self.id, Holding { held: own.held + count, ..own });
        Some(Permit { permits: Arc::clone(&self.permits), id: self.id, count })
    }

    /// Keeps the next permit that is returned for this handler, until it has taken it or calls [`Share::withdraw`].
    /// Without effect if there are enough permits for shares.
    pub(crate) fn ask(&self) {
        let mut shares = self.permits.lock();
        if self.permits.total < shares.held.len() && !shares.asking.contains(&self.id) {
            shares.asking.push(self.id);
        }
    }

    /// Asks no longer: the others may take the permit that was kept.
    pub(crate) fn withdraw(&self) {
        let mut shares = self.permits.lock();
        let before = shares.asking.len();
        shares.asking.retain(|id| *id != self.id);
        let has_asked = shares.asking.len() < before;
        drop(shares);
        if has_asked {
            self.permits.returned.notify_waiters();
        }
    }

    /// Whether this handler asks for a permit.
    pub(crate) fn is_asking(&self) -> bool {
        self.permits.lock().asking.contains(&self.id)
    }

    /// Whether this handler should return a permit: others ask for more than are free.
    pub(crate) fn is_needed(&self) -> bool {
        let shares = self.permits.lock();
        !shares.asking.is_empty() && shares.asking_before(self.id) > shares.unheld(self.permits.total)
    }

    /// How many permits this handler could take, which holds `own`.
    fn available(&self, shares: &Shares, own: Holding) -> usize {
        available(self.permits.total, own, self.others(shares)).saturating_sub(shares.asking_before(self.id))
    }

    /// What the other handlers hold.
    fn others(&self, shares: &Shares) -> impl Iterator<Item = Holding> + Clone {
        shares.held.iter().filter(|(id, _)| **id != self.id).map(|(_, holding)| *holding)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut shares = self.permits.lock();
        shares.held.remove(&self.id);
        shares.asking.retain(|id| *id != self.id);
        drop(shares);
        self.permits.returned.notify_waiters();
    }
}

/// The right to hold connections, mostly one. Given back when dropped.
pub(crate) struct Permit {
    permits: Arc<Permits>,
    id: u64,
    /// How many connections it allows.
    pub(crate) count: usize,
}

impl Permit {
    /// Splits off one permit, if there is one left.
    pub(crate) fn split_off(&mut self) -> Option<Self> {
        self.count = self.count.checked_sub(1)?;
        Some(Self { permits: Arc::clone(&self.permits), id: self.id, count: 1 })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.count == 0 {
            return;
        }
        if let Some(holding) = self.permits.lock().held.get_mut(&self.id) {
            holding.held -= self.count;
        }
        self.permits.returned.notify_waiters();
    }
}

/// How many more permits a handler can take that holds `own`, while the `others` hold theirs.
fn available(total: usize, own: Holding, others: impl Iterator<Item = Holding> + Clone) -> usize {
    let handlers = others.clone().count() + 1;
    let weights = own.weight + others.clone().map(|other| other.weight).sum::<usize>();
    // With fewer permits than handlers there is nothing to divide: first come, first served.
    let share = |of: Holding| if total < handlers { 0 } else { (total * of.weight / (2 * weights)).max(1) };
    let held: usize = own.held + others.clone().map(|other| other.held).sum::<usize>();
    let kept_for_others: usize = others.map(|other| share(other).saturating_sub(other.held)).sum();
    total.saturating_sub(held + kept_for_others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_busy_handler_takes_most_permits_and_leaves_the_others_their_share() {
        let permits = Permits::new(8);
        let (slow, quick) = (permits.share(2), permits.share(2));
        let mut held = slow.take(100).unwrap();
        assert_eq!(held.count, 6);
        assert!(slow.take(1).is_none());
        let of_quick = quick.take(100).unwrap();
        assert_eq!(of_quick.count, 2);
        assert!(quick.take(1).is_none());
        drop(held.split_off());
        assert_eq!(quick.take(100).unwrap().count, 1);
    }

    #[test]
    fn the_reserved_share_of_high_priority_is_four_times_that_of_low() {
        let permits = Permits::new(20);
        let (high, low) = (permits.share(4), permits.share(1));
        assert_eq!(low.take(100).unwrap().count, 12, "eight are kept for the other");
        assert_eq!(high.take(100).unwrap().count, 18, "two are kept for the other");
    }

    #[test]
    fn the_next_permit_is_kept_for_the_handler_that_asked_first() {
        let permits = Permits::new(1);
        let (busy, first, second) = (permits.share(4), permits.share(1), permits.share(4));
        let held = busy.take(1);
        [&first, &second, &first].iter().for_each(|share| share.ask());
        assert!(busy.is_needed() && first.is_asking());
        drop(held);
        assert_eq!((busy.free(), second.free(), first.free()), (0, 0, 1));
        assert!(busy.take(1).is_none() && second.take(1).is_none());
        let held = first.take(1);
        assert!(held.is_some() && !first.is_asking());
        drop(held);
        assert_eq!((busy.free(), second.free()), (0, 1));
        second.withdraw();
        assert!(!busy.is_needed() && busy.take(1).is_some());
        second.ask();
        drop(second);
        assert!(!busy.is_needed());
    }

    #[test]
    fn a_single_handler_takes_all_permits_and_a_dropped_share_is_free() {
        let permits = Permits::new(3);
        let (one, other) = (permits.share(2), permits.share(2));
        drop(other);
        assert_eq!(one.take(100).unwrap().count, 3);
    }

    proptest! {
        #[test]
        fn never_more_than_all_permits_are_held_and_no_handler_is_excluded(
            total in 1usize..40, weights in prop::collection::vec(prop::sample::select(vec![1usize, 2, 4]), 4), takes in prop::collection::vec((0usize..4, 1usize..10), 1..40),
        ) {
            let permits = Permits::new(total);
            let shares: Vec<Share> = weights.iter().map(|weight| permits.share(*weight)).collect();
            let mut held: Vec<Vec<Permit>> = (0..4).map(|_| Vec::new()).collect();
            for (handler, max) in takes {
                match shares[handler].take(max) {
                    Some(permit) => held[handler].push(permit),
                    None => drop(held[handler].pop()),
                }
                let count = |of: &Vec<Permit>| of.iter().map(|permit| permit.count).sum::<usize>();
                prop_assert!(held.iter().map(count).sum::<usize>() <= total);
                if total >= shares.len() {
                    for (share, of) in shares.iter().zip(&held) {
                        prop_assert!(count(of) > 0 || share.take(1).is_some());
                    }
                }
            }
        }
    }
}

//! Permits: how many transactional handlers may hold a connection of a store at a time, shared out among the handlers.
//!
//! A permit is taken when a run begins; what waits in memory holds none. Every handler that is transactional has a share
//! that the others cannot take: half of the permits are divided evenly, the rest goes to whoever comes first. So a slow handler can use most
//! of the connections while nobody else wants them, and never all of them. All inboxes on a store share its permits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

pub(crate) struct Permits {
    total: usize,
    /// A std mutex: nothing awaits while holding it.
    shares: Mutex<Shares>,
    /// Told when permits are given back.
    pub(crate) returned: Notify,
}

#[derive(Default)]
struct Shares {
    next_id: u64,
    /// How many permits each handler holds.
    held: HashMap<u64, usize>,
}

impl Permits {
    pub(super) fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total, shares: Mutex::default(), returned: Notify::new() })
    }

    /// A share for one more handler, as long as the answer is kept.
    pub(crate) fn share(self: &Arc<Self>) -> Share {
        let mut shares = self.lock();
        let id = shares.next_id;
        shares.next_id += 1;
        shares.held.insert(id, 0);
        Share { permits: Arc::clone(self), id }
    }

    fn lock(&self) -> MutexGuard<'_, Shares> {
        // No code under the lock can panic; if it did, the counts would still be consistent.
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of one handler.
pub(crate) struct Share {
    permits: Arc<Permits>,
    id: u64,
}

impl Share {
    /// How many permits this handler could take now.
    pub(crate) fn free(&self) -> usize {
        let shares = self.permits.lock();
        let Some(own) = shares.held.get(&self.id).copied() else { return 0 };
        let others = shares.held.iter().filter(|(id, _)| **id != self.id).map(|(_, held)| *held);
        available(self.permits.total, own, others)
    }

    /// Takes permits that are free for this handler, at most `max` and at least one.
    pub(crate) fn take(&self, max: usize) -> Option<Permit> {
        let mut shares = self.permits.lock();
        let own = shares.held.get(&self.id).copied()?;
        let others = shares.held.iter().filter(|(id, _)| **id != self.id).map(|(_, held)| *held);
        let count = available(self.permits.total, own, others).min(max);
        shares.held.insert(self.id, own + count);
        (count > 0).then(|| Permit { permits: Arc::clone(&self.permits), id: self.id, count })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.permits.lock().held.remove(&self.id);
        self.permits.returned.notify_waiters();
    }
}

/// The right to hold connections, mostly one. Given back when dropped.
pub(crate) struct Permit {
    permits: Arc<Permits>,
    id: u64,
    pub(crate) count: usize,
}

impl Permit {
    /// One of several, if there is one left.
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
        if let Some(held) = self.permits.lock().held.get_mut(&self.id) {
            *held -= self.count;
        }
        self.permits.returned.notify_waiters();
    }
}

/// How many more permits a handler can take that holds `own`, beside `others` that hold theirs.
fn available(total: usize, own: usize, others: impl Iterator<Item = usize> + Clone) -> usize {
    let handlers = others.clone().count() + 1;
    // With fewer permits than handlers there is nothing to divide: whoever comes first.
    let share = if total < handlers { 0 } else { (total / (2 * handlers)).max(1) };
    let held: usize = own + others.clone().sum::<usize>();
    let kept_for_others: usize = others.map(|held| share.saturating_sub(held)).sum();
    total.saturating_sub(held + kept_for_others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_busy_handler_takes_most_and_leaves_the_others_their_share() {
        let permits = Permits::new(8);
        let (slow, quick) = (permits.share(), permits.share());
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
    fn one_handler_alone_takes_everything_and_a_share_that_is_dropped_is_free() {
        let permits = Permits::new(3);
        let (one, other) = (permits.share(), permits.share());
        drop(other);
        assert_eq!(one.take(100).unwrap().count, 3);
    }

    proptest! {
        #[test]
        fn no_more_than_all_are_held_and_nobody_is_shut_out(
            total in 1usize..20, takes in prop::collection::vec((0usize..4, 1usize..10), 1..40),
        ) {
            let permits = Permits::new(total);
            let shares: Vec<Share> = (0..4).map(|_| permits.share()).collect();
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

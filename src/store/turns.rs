//! Turns of tenants: how many deliveries of each tenant a claim of a fair handler takes, and where the next claim
//! continues. Pure.
//!
//! A scan goes from tenant to tenant in the order of their hashes, beginning after the one that had the last turn. It
//! ends when it has found as many tenants with due deliveries as deliveries are wanted, when it has visited all
//! tenants, or after a bounded number of tenants; the next claim continues from there. Each tenant costs two index
//! probes, whatever the size of its backlog.

// Public in a private module, as in `seam.rs`.
#![allow(unreachable_pub, missing_docs)]

use super::asks::Stamp;

/// How many tenants without due deliveries one scan may skip.
pub(super) const IN_VAIN_MAX: i32 = 256;
/// The number of oldest deliveries in which a scan searches for those that were stored before their handler was fair.
pub(super) const OLDEST_MAX: i32 = 100;

/// Whose turn it is after a claim for a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turns {
    /// The id that was asked for.
    pub handler_id: i16,
    /// The tenant that was checked last; `None` if nothing was due.
    pub last: Option<i64>,
    /// No open delivery that the scan could claim is due before this.
    pub oldest: Option<Stamp>,
    /// A tenant may have more due deliveries than its share, or not all tenants were checked.
    pub is_more: bool,
}

/// The result of a scan of the tenants of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TenantScan {
    /// The id that was asked for.
    pub(super) handler_id: i16,
    /// When the oldest open delivery is due; `None` if there is none.
    pub(super) oldest: Option<Stamp>,
    /// One of the oldest deliveries was stored before the handler was fair.
    pub(super) has_unmarked: bool,
    /// Tenants with due deliveries, in the order of their turns.
    pub(super) tenants: Vec<i64>,
    /// The tenant that was checked last; `None` if no tenant was checked.
    pub(super) last: Option<i64>,
    /// The scan has visited all tenants.
    pub(super) is_whole: bool,
}

/// How many deliveries to claim of each tenant that was found, and of those that were stored before the handler was
/// fair.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// One per tenant, in the order of their turns.
    pub(super) tenants: Vec<i32>,
    /// For deliveries without a tenant.
    pub(super) unmarked: i32,
    /// The smallest full share of a tenant.
    full: i32,
}

impl Shares {
    /// Divides `limit` evenly. The remainder goes to the first ones. The deliveries without a tenant get a random place
    /// among them, so that they have a turn however few deliveries are wanted.
    pub(super) fn new(limit: i32, scanned: &TenantScan, chance: usize) -> Self {
        // If something is due and its tenant was not found yet, the oldest delivery is claimed meanwhile.
        let takes_oldest = scanned.has_unmarked || scanned.tenants.is_empty() && !scanned.is_whole;
        let parties = scanned.tenants.len() + usize::from(takes_oldest);
        let count = i32::try_from(parties).unwrap_or(i32::MAX).max(1);
        let (each, rest) = (limit.max(0) / count, usize::try_from(limit.max(0) % count).unwrap_or(0));
        let share = |place: usize| each + i32::from(place < rest);
        let own_place = takes_oldest.then(|| chance % parties);
        let places = (0..parties).filter(|place| Some(*place) != own_place);
        Self { tenants: places.map(share).collect(), unmarked: own_place.map_or(0, share), full: each.max(1) }
    }

    /// The state after a claim. When the rate limit is used up, no further scan is needed.
    pub(super) fn turns(&self, scanned: &TenantScan, claimed: usize, is_rated: bool) -> Turns {
        let claimed = i32::try_from(claimed).unwrap_or(i32::MAX);
        let is_unseen = !scanned.is_whole && (claimed > 0 || !is_rated);
        let TenantScan { handler_id, last, oldest, .. } = *scanned;
        Turns { handler_id, last, oldest, is_more: claimed >= self.full || is_unseen }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scanned(tenants: usize, has_unmarked: bool, is_whole: bool) -> TenantScan {
        let tenants = (0..tenants).map(|tenant| tenant as i64).collect::<Vec<_>>();
        TenantScan { handler_id: 1, oldest: None, has_unmarked, last: tenants.last().copied(), tenants, is_whole }
    }

    #[test]
    fn a_single_tenant_gets_the_whole_limit() {
        assert_eq!(Shares::new(16, &scanned(1, false, true), 7).tenants, [16]);
    }

    #[test]
    fn with_a_limit_of_one_chance_decides_between_a_tenant_and_unmarked_deliveries() {
        let one_of_each = scanned(1, true, false);
        assert_eq!(Shares::new(1, &one_of_each, 0), Shares { tenants: vec![0], unmarked: 1, full: 1 });
        assert_eq!(Shares::new(1, &one_of_each, 1), Shares { tenants: vec![1], unmarked: 0, full: 1 });
    }

    #[test]
    fn if_no_tenant_was_found_the_oldest_deliveries_are_claimed() {
        assert_eq!(Shares::new(5, &scanned(0, false, false), 3).unmarked, 5);
        assert_eq!(Shares::new(5, &scanned(0, false, true), 3).unmarked, 0);
    }

    #[test]
    fn more_may_be_due_after_a_full_share_or_an_incomplete_scan() {
        let is_more = |tenants, is_whole, claimed, is_rated| {
            let scanned = scanned(tenants, false, is_whole);
            Shares::new(16, &scanned, 0).turns(&scanned, claimed, is_rated).is_more
        };
        assert!(is_more(2, true, 9, false), "one tenant had 8 and the other 1");
        assert!(!is_more(2, true, 7, false));
        assert!(!is_more(0, true, 0, false));
        assert!(is_more(0, false, 0, false));
        assert!(!is_more(16, false, 0, true), "the rate limit allows nothing");
    }

    proptest! {
        #[test]
        fn the_limit_is_divided_completely_and_evenly(
            limit in 1i32..600, tenants in 0usize..40, has_unmarked: bool, chance: usize,
        ) {
            let Shares { tenants: of_tenants, unmarked, .. } = Shares::new(limit, &scanned(tenants, has_unmarked, true), chance);
            prop_assert_eq!(of_tenants.len(), tenants);
            prop_assert!(has_unmarked || unmarked == 0);
            let all = of_tenants.iter().copied().chain(has_unmarked.then_some(unmarked)).collect::<Vec<_>>();
            if let (Some(most), Some(least)) = (all.iter().max(), all.iter().min()) {
                prop_assert_eq!(all.iter().sum::<i32>(), limit);
                prop_assert!(most - least <= 1);
            }
        }
    }
}

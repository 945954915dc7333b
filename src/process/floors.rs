//! What the next claims of a handler ask for: how many deliveries, where they begin in the claim index, and for a fair
//! handler, after which tenant.

use std::collections::HashMap;

use super::scans::Scan;
use super::slots::Place;
use crate::store::Backend;
use crate::store::seam::{Ask, AskedRate, Claimed, ScanFrom, Stamp, Turns};

/// How many empty claims in a row are repeated at once because not all tenants were checked. After that, the next claim
/// waits for a notification or the poll.
const IN_VAIN_MAX: u32 = 64;

/// The progress of the claims, by handler id.
#[derive(Debug, Default)]
pub(super) struct Floors {
    /// The floor: the last claimed position in the index. Later claims begin there, and skip finished rows.
    floors: HashMap<i16, Stamp>,
    /// Only of fair handlers.
    turns: HashMap<i16, Turn>,
}

/// How far a fair handler's turns have come.
#[derive(Debug)]
struct Turn {
    /// The tenant that had the last turn.
    after: i64,
    /// Claims in a row that found nothing.
    in_vain: u32,
}

impl Floors {
    /// The floor of a handler id; `None` before its first claim in this process.
    pub(super) fn of(&self, handler_id: i16) -> Option<Stamp> {
        self.floors.get(&handler_id).copied()
    }

    /// Raises the floor to a claimed delivery. Claims follow the order of the index, so everything before it is claimed
    /// too.
    pub(super) fn raise(&mut self, claimed: &Claimed) {
        let floor = self.floors.entry(claimed.claim.handler_id).or_insert(claimed.due_at);
        *floor = claimed.due_at.max(*floor);
    }

    /// Lowers the floor to a released delivery, so that the next claim finds it without a deep scan.
    pub(super) fn lower(&mut self, claimed: &Claimed) {
        let due_at = claimed.due_at;
        self.floors.entry(claimed.claim.handler_id).and_modify(|floor| *floor = due_at.min(*floor));
    }

    /// The tenant that had the last turn. The turns of a new process begin at `chance`: a process that restarts often
    /// must not begin with the same tenants each time.
    pub(super) fn after(&mut self, handler_id: i16, chance: i64) -> i64 {
        self.turns.entry(handler_id).or_insert(Turn { after: chance, in_vain: 0 }).after
    }

    /// Records whose turn it is. Returns whether another claim makes sense at once.
    pub(super) fn took_turns(&mut self, turns: &Turns, claimed: usize) -> bool {
        if let Some(oldest) = turns.oldest {
            self.floors.insert(turns.handler_id, oldest);
        }
        let turn = self.turns.entry(turns.handler_id).or_insert(Turn { after: 0, in_vain: 0 });
        turn.after = turns.last.unwrap_or(turn.after);
        turn.in_vain = if claimed > 0 { 0 } else { turn.in_vain.saturating_add(1) };
        turns.is_more && turn.in_vain < IN_VAIN_MAX
    }
}

/// How many deliveries to ask for, for each id of the lane: the places are shared, starting with another id each round.
pub(super) fn asks<B: Backend>(floors: &mut Floors, places: &Place<B>, round: usize, scan: Scan) -> Vec<Ask> {
    let lane = &places.lane;
    let (ids, free) = (&lane.ids.all, places.count);
    let share = |position: usize| {
        let place = (position + round) % ids.len();
        free / ids.len() + usize::from(place < free % ids.len())
    };
    let shares = ids.iter().enumerate().map(|(position, &handler_id)| (handler_id, share(position)));
    shares
        .filter(|(_, limit)| *limit > 0)
        .map(|(handler_id, limit)| Ask {
            handler_id,
            limit: i32::try_from(limit).unwrap_or(i32::MAX),
            after: lane.is_fair.then(|| floors.after(handler_id, rand::random())),
            is_probe: places.probe.is_some(),
            rate: if lane.is_rated() { AskedRate::Limited(lane.ids.lowest()) } else { AskedRate::Unlimited },
            from: match (scan.depth(), floors.of(handler_id)) {
                (None, _) => ScanFrom::Beginning,
                (Some(depth), floor) => ScanFrom::Below { floor, depth },
            },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_continue_after_the_last_tenant_and_empty_scans_end() {
        let mut floors = Floors::default();
        assert_eq!(floors.after(1, 70), 70);
        assert_eq!(floors.after(1, 80), 70);
        let turns = Turns { handler_id: 1, last: Some(90), oldest: Some(Stamp(5)), is_more: true };
        assert!(floors.took_turns(&turns, 1));
        assert_eq!((floors.after(1, 70), floors.of(1)), (90, Some(Stamp(5))));
        let again = (0..1_000).take_while(|_| floors.took_turns(&turns, 0)).count();
        assert_eq!(again, 63);
        assert!(floors.took_turns(&turns, 1));
    }
}

//! Which lane takes connections first when several transactional handlers need them. Pure.

use std::cmp::Reverse;

/// One pass in this many ignores priorities.
const PASSES: usize = 4;

/// All lanes, higher priorities first, and among equals another one first each time. Every fourth pass ignores
/// priorities and begins with each lane in turn, so that a busy lane of high priority does not block the others for
/// ever.
pub(super) fn in_precedence<T, P: Ord>(lanes: &[T], pass: usize, priority: impl Fn(&T) -> P) -> Vec<&T> {
    let is_for_all = pass % PASSES == PASSES - 1;
    // Each kind of pass has its own turns: with one counter, the same lanes could be missed each time.
    let turn = if is_for_all { pass / PASSES } else { pass - pass / PASSES };
    let (later, first) = lanes.split_at(turn.checked_rem(lanes.len()).unwrap_or(0));
    let mut lanes: Vec<&T> = first.iter().chain(later).collect();
    if !is_for_all {
        // The sort is stable, so lanes of equal priority keep their turns.
        lanes.sort_by_key(|lane| Reverse(priority(lane)));
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn firsts(lanes: &[(char, u8)], passes: usize) -> String {
        (0..passes).map(|pass| in_precedence(lanes, pass, |lane| lane.1)[0].0).collect()
    }

    #[test]
    fn handlers_of_equal_priority_take_turns() {
        let lanes = [('a', 1), ('b', 1), ('c', 1), ('d', 1), ('e', 1)];
        for count in 1..=lanes.len() {
            let firsts = firsts(&lanes[..count], 20 * count);
            assert!(lanes[..count].iter().all(|(lane, _)| firsts.matches(*lane).count() == 20), "{firsts}");
        }
    }

    #[test]
    fn higher_priority_comes_first_in_three_of_four_claims_and_the_others_take_turns() {
        let firsts = firsts(&[('a', 1), ('b', 1), ('z', 2)], 48);
        assert!(firsts.matches('z').count() >= 36, "{firsts}");
        for lane in ['a', 'b'] {
            assert!(firsts.matches(lane).count() >= 3, "{firsts}");
        }
        assert!(in_precedence::<(char, u8), u8>(&[], 3, |lane| lane.1).is_empty());
    }
}

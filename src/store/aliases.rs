//! Decides which ids belong to which handler, given the keys that already have one. Pure: the stores read, call this,
//! and write.
//!
//! A key never changes its id, and no id ever belongs to two handlers of one inbox.

use std::collections::{BTreeMap, HashMap};

use super::seam::{HandlerIds, WantedHandler};
use crate::types::{Error, Result};

/// What must be written so that all wanted keys have ids.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct AliasPlan {
    /// Keys that get an existing id: (key, id).
    pub(super) aliases: Vec<(String, i16)>,
    /// Handlers that get a new id, with all their keys; the first key is the current one.
    pub(super) new_handlers: Vec<Vec<String>>,
}

/// Computes what must be written. Former keys without an id get the handler's id, so that an old build that starts
/// later shares it.
pub(super) fn plan(wanted: &[WantedHandler], known: &HashMap<String, i16>) -> AliasPlan {
    let mut plan = AliasPlan::default();
    for handler in wanted {
        let keys = || std::iter::once(&handler.key).chain(&handler.former_keys);
        let unknown: Vec<String> = keys().filter(|key| !known.contains_key(*key)).cloned().collect();
        match keys().find_map(|key| known.get(key)) {
            Some(&id) => plan.aliases.extend(unknown.into_iter().map(|key| (key, id))),
            None => plan.new_handlers.push(unknown),
        }
    }
    plan
}

/// Refuses, before anything is written, two handlers that would own the same id. (A rollback does not return ids, and
/// there are only 32,767.)
pub(super) fn refuse_shared_ids(wanted: &[WantedHandler], known: &HashMap<String, i16>) -> Result<()> {
    let mut owners: BTreeMap<i16, &str> = BTreeMap::new();
    for handler in wanted {
        let keys = std::iter::once(&handler.key).chain(&handler.former_keys);
        for id in keys.filter_map(|key| known.get(key)) {
            match owners.insert(*id, &handler.key) {
                Some(other) if other != handler.key => {
                    return Err(Error::configuration(format!(
                        "handler keys {other} and {} name the same handler in this database: one was a former key of the \
                         other. Use a new key for one of them",
                        handler.key
                    )));
                }
                Some(_) | None => {}
            }
        }
    }
    Ok(())
}

/// The ids of each wanted handler, once all its keys have one.
///
/// # Errors
/// When two handlers would own the same id: one was once known by a key that the other now uses.
pub(super) fn resolve(wanted: &[WantedHandler], known: &HashMap<String, i16>) -> Result<Vec<HandlerIds>> {
    refuse_shared_ids(wanted, known)?;
    let mut resolved = Vec::with_capacity(wanted.len());
    for handler in wanted {
        let id_of = |key: &String| {
            let id = known.get(key).copied();
            id.ok_or_else(|| Error::configuration(format!("handler key {key} has no id")))
        };
        let current = id_of(&handler.key)?;
        let mut all = vec![current];
        for key in &handler.former_keys {
            let id = id_of(key)?;
            if !all.contains(&id) {
                all.push(id);
            }
        }
        resolved.push(HandlerIds { current, all: all.into() });
    }
    Ok(resolved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wanted(key: &str, former: &[&str]) -> WantedHandler {
        WantedHandler {
            key: key.to_owned(),
            former_keys: former.iter().map(|k| (*k).to_owned()).collect(),
            ..WantedHandler::default()
        }
    }

    /// An in-memory table of keys that executes plans as the stores do.
    #[derive(Default)]
    struct Keys(HashMap<String, i16>, i16);

    impl Keys {
        fn register(&mut self, handlers: &[WantedHandler]) -> Result<Vec<HandlerIds>> {
            let plan = plan(handlers, &self.0);
            self.0.extend(plan.aliases);
            for keys in plan.new_handlers {
                self.1 += 1;
                self.0.extend(keys.into_iter().map(|key| (key, self.1)));
            }
            resolve(handlers, &self.0)
        }
    }

    #[test]
    fn renamed_twice_and_back_it_is_still_one_handler() {
        let mut known = Keys::default();
        let first = known.register(&[wanted("a", &[])]).unwrap();
        for renamed in [wanted("b", &["a"]), wanted("c", &["b", "a"]), wanted("c", &["b"]), wanted("a", &["c"])] {
            assert_eq!(known.register(&[renamed]).unwrap(), first);
        }
    }

    #[test]
    fn an_old_build_that_starts_after_the_rename_shares_the_id() {
        let mut known = Keys::default();
        let renamed = known.register(&[wanted("b", &["a"])]).unwrap();
        assert_eq!(known.register(&[wanted("a", &[])]).unwrap(), renamed);
    }

    #[test]
    fn two_keys_with_ids_become_one_handler_that_owns_both() {
        let mut known = Keys::default();
        known.register(&[wanted("a", &[])]).unwrap();
        known.register(&[wanted("b", &[])]).unwrap();
        let both = known.register(&[wanted("b", &["a"])]).unwrap();
        assert_eq!(both, [HandlerIds { current: 2, all: [2, 1].into() }]);
    }

    #[test]
    fn a_former_key_of_another_handler_is_refused() {
        let mut known = Keys::default();
        known.register(&[wanted("b", &["a"])]).unwrap();
        let error = known.register(&[wanted("b", &[]), wanted("a", &[])]).unwrap_err().to_string();
        assert!(error.contains("keys b and a"), "{error}");
    }

    proptest! {
        #[test]
        fn keys_keep_their_id_and_no_id_has_two_handlers(
            rounds in prop::collection::vec(prop::collection::vec((0u8..8, prop::collection::vec(0u8..8, 0..3)), 1..4), 1..8),
        ) {
            let mut known = Keys::default();
            for round in rounds {
                let before = known.0.clone();
                let mut used = std::collections::HashSet::new();
                let handlers: Vec<_> = round.into_iter().filter_map(|(key, former)| {
                    // build() has already refused duplicate keys.
                    used.insert(key).then(|| WantedHandler {
                        key: key.to_string(),
                        former_keys: former.into_iter().filter(|k| used.insert(*k)).map(|k| k.to_string()).collect(),
                        ..WantedHandler::default()
                    })
                }).collect();
                if let Ok(ids) = known.register(&handlers) {
                    let mut all: Vec<i16> = ids.iter().flat_map(|ids| ids.all.iter().copied()).collect();
                    let total = all.len();
                    all.sort_unstable();
                    all.dedup();
                    prop_assert_eq!(all.len(), total);
                }
                for (key, id) in before {
                    prop_assert_eq!(known.0[&key], id);
                }
            }
        }
    }
}

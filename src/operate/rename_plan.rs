//! Compares the handler keys of a build with those in the database: which ones the build keeps, renames, adds and
//! removes.
//!
//! Pure. A deploy pipeline writes the new build's manifest to a file and compares it with production before the deploy.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::HandlerStatus;

/// The handler keys of a build. [`Inbox::manifest`](crate::Inbox::manifest) and
/// [`InboxBuilder::manifest`](crate::InboxBuilder::manifest) return it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// The handlers, in the order of registration.
    pub handlers: Vec<ManifestHandler>,
}

/// A handler of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ManifestHandler {
    /// The key of the handler.
    pub key: String,
    /// Former keys of the handler.
    #[serde(default)]
    pub formerly: Vec<String>,
}

/// The effect of a build on one handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedHandler {
    /// The stored handler's current key; for a new handler, its key.
    pub handler_key: String,
    /// How the build changes the key.
    pub change: KeyChange,
    /// The number of pending and running deliveries, including those that wait for an earlier one of their order key.
    pub open: u64,
    /// The number of poisoned deliveries.
    pub poisoned: u64,
    /// Keys under which deliveries of this handler may be stored and that no handler of the build has, although the build
    /// has other keys of it. This happens if handlers became one and the build has not all of their keys.
    #[serde(default)]
    pub abandoned: Vec<String>,
    /// For a removed handler with finished deliveries in the database: the new keys of the build. If one of them is the
    /// handler's new name and is registered without `formerly`, a redelivered record creates a delivery under the new
    /// key, and the handler runs a second time.
    pub may_be_renamed_to: Vec<String>,
}

/// How a build changes a handler key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum KeyChange {
    /// The build has the key.
    Kept,
    /// The build has the handler under another key.
    Renamed {
        /// The key in the build.
        to: String,
    },
    /// The database does not have the key yet.
    New,
    /// The build does not have the key.
    Removed,
    /// Several handlers of the build have keys under which the deliveries of this one are stored. The build does not
    /// start, because a delivery belongs to one handler.
    Split {
        /// Their keys in the build.
        into: Vec<String>,
    },
    /// Several handlers of the build were separate before a later build united them: this is a rollback of that build.
    /// Each gets its own deliveries back.
    Separated {
        /// Their keys in the build.
        into: Vec<String>,
    },
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept => f.write_str("kept"),
            Self::Renamed { to } => write!(f, "renamed to {to}"),
            Self::New => f.write_str("new"),
            Self::Removed => f.write_str("removed"),
            Self::Split { into } => write!(f, "split into {}", into.join(" and ")),
            Self::Separated { into } => write!(f, "separated into {}", into.join(" and ")),
        }
    }
}

impl PlannedHandler {
    /// Whether the build starts, no delivery is abandoned and none runs twice. Deliveries of a key that no process knows
    /// are poisoned after a grace period, and poisoned ones cannot run when replayed. The finished work of a renamed
    /// handler is known only under its stored key.
    pub fn is_safe(&self) -> bool {
        let has_none = self.open + self.poisoned == 0;
        match self.change {
            KeyChange::New => true,
            KeyChange::Kept | KeyChange::Renamed { .. } | KeyChange::Separated { .. } => {
                has_none || self.abandoned.is_empty()
            }
            KeyChange::Removed => has_none && self.may_be_renamed_to.is_empty(),
            KeyChange::Split { .. } => false,
        }
    }
}

impl Manifest {
    /// Returns the effect of this build on the stored handlers, followed by the new handlers.
    ///
    /// ```
    /// # async fn example(inbox: wharf::Inbox<wharf::Postgres>, store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let stored = store.operate().handlers().await?;
    /// for handler in inbox.manifest().plan(&stored) {
    ///     println!("{}: {}, safe: {}", handler.handler_key, handler.change, handler.is_safe());
    /// }
    /// # Ok(()) }
    /// ```
    pub fn plan(&self, stored: &[HandlerStatus]) -> Vec<PlannedHandler> {
        let has = |entry: &ManifestHandler, key: &String| *key == entry.key || entry.formerly.contains(key);
        let is_of = |entry: &ManifestHandler, handler: &HandlerStatus| {
            has(entry, &handler.handler_key) || handler.former_keys.iter().any(|key| has(entry, key))
        };
        let is_new = |entry: &&ManifestHandler| !stored.iter().any(|handler| is_of(entry, handler));
        let new_keys: Vec<String> = self.handlers.iter().filter(is_new).map(|entry| entry.key.clone()).collect();
        let old = stored.iter().map(|handler| {
            let entries: Vec<&ManifestHandler> = self.handlers.iter().filter(|entry| is_of(entry, handler)).collect();
            let owners = |keys: &Vec<String>| {
                let is_owner = |entry: &&&ManifestHandler| keys.iter().any(|key| has(entry, key));
                entries.iter().filter(is_owner).count()
            };
            let into = || entries.iter().map(|entry| entry.key.clone()).collect();
            let change = match &entries[..] {
                [] => KeyChange::Removed,
                [entry] if entry.key == handler.handler_key => KeyChange::Kept,
                [entry] => KeyChange::Renamed { to: entry.key.clone() },
                _ if handler.keys_by_id.is_empty() || handler.keys_by_id.iter().any(|keys| owners(keys) > 1) => {
                    KeyChange::Split { into: into() }
                }
                _ => KeyChange::Separated { into: into() },
            };
            let orphaned = handler.keys_by_id.iter().filter(|keys| !entries.is_empty() && owners(keys) == 0);
            let abandoned = orphaned.flatten().cloned().collect();
            let is_doubtful = change == KeyChange::Removed && handler.keeps_finished;
            PlannedHandler {
                handler_key: handler.handler_key.clone(),
                may_be_renamed_to: if is_doubtful { new_keys.clone() } else { Vec::new() },
                change,
                abandoned,
                open: handler.due + handler.later + handler.held + handler.running,
                poisoned: handler.poisoned,
            }
        });
        let new = new_keys.iter().map(|key| PlannedHandler {
            handler_key: key.clone(),
            change: KeyChange::New,
            open: 0,
            poisoned: 0,
            abandoned: Vec::new(),
            may_be_renamed_to: Vec::new(),
        });
        old.chain(new).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(key: &str, former: &[&str], open: u64, poisoned: u64) -> HandlerStatus {
        let former: Vec<String> = former.iter().map(|key| (*key).to_owned()).collect();
        let keys: Vec<String> = std::iter::once(key.to_owned()).chain(former.iter().cloned()).collect();
        serde_json::from_value(serde_json::json!({
            "handler_key": key, "former_keys": former, "keys_by_id": [keys], "due": open, "later": 0, "running": 0, "poisoned": poisoned,
            "oldest_due_secs": null, "next_due_at": null, "paused_at": null, "unknown_since": null, "processors": 1, "keeps_finished": false,
        }))
        .unwrap()
    }

    fn build(handlers: &[(&str, &[&str])]) -> Manifest {
        let entry = |(key, formerly): &(&str, &[&str])| ManifestHandler {
            key: (*key).to_owned(),
            formerly: formerly.iter().map(|key| (*key).to_owned()).collect(),
        };
        Manifest { handlers: handlers.iter().map(entry).collect() }
    }

    fn told(plan: &[PlannedHandler]) -> Vec<String> {
        plan.iter().map(|one| format!("{} {:?} {}", one.handler_key, one.change, one.is_safe())).collect()
    }

    #[test]
    fn kept_renamed_new_and_removed_handlers_are_distinguished() {
        let stored = [stored("a", &[], 5, 0), stored("b", &[], 5, 0), stored("c", &[], 0, 0), stored("d", &[], 1, 0)];
        let plan = build(&[("a", &[]), ("b2", &["b"]), ("e", &[])]).plan(&stored);
        let expected =
            ["a Kept true", "b Renamed { to: \"b2\" } true", "c Removed true", "d Removed false", "e New true"];
        assert_eq!(told(&plan), expected);
    }

    // The start refuses such a build (`aliases.rs`).
    #[test]
    fn a_build_that_registers_a_key_and_its_former_key_as_two_handlers_is_not_safe() {
        let stored = [stored("mail.receipt", &["receipts"], 0, 0)];
        let plan = build(&[("receipts", &[]), ("mail.receipt", &[])]).plan(&stored);
        assert_eq!(told(&plan), ["mail.receipt Split { into: [\"receipts\", \"mail.receipt\"] } false"]);
        assert_eq!(plan[0].change.to_string(), "split into receipts and mail.receipt");
        let united = build(&[("mail.receipt", &["receipts"])]).plan(&stored);
        assert_eq!(told(&united), ["mail.receipt Kept true"]);
    }

    // The start accepts it, because no id belongs to two handlers.
    #[test]
    fn a_rollback_to_handlers_that_a_later_build_has_united_is_safe() {
        let keys_by_id = vec![vec!["a".to_owned(), "older".to_owned()], vec!["b".to_owned()]];
        let united = [HandlerStatus { keys_by_id, ..stored("b", &["a", "older"], 5, 1) }];
        let told_of = |handlers: &[(&str, &[&str])]| told(&build(handlers).plan(&united));
        assert_eq!(told_of(&[("a", &["older"]), ("b", &[])]), ["b Separated { into: [\"a\", \"b\"] } true"]);
        assert_eq!(told_of(&[("a", &[]), ("older", &["b"])]), ["b Split { into: [\"a\", \"older\"] } false"]);
        assert_eq!(told_of(&[("a", &[]), ("b", &["a"])]), ["b Split { into: [\"a\", \"b\"] } false"]);
        // Deliveries that are stored under the id of the other key would have no handler.
        assert_eq!(told_of(&[("a", &[])]), ["b Renamed { to: \"a\" } false"]);
        assert_eq!(build(&[("b", &[])]).plan(&united)[0].abandoned, ["a", "older"]);
        assert_eq!(told_of(&[("b", &["a"])]), ["b Kept true"]);
    }

    #[test]
    fn deliveries_that_wait_for_their_order_key_are_open() {
        let handler = HandlerStatus { held: 3, ..stored("mail", &[], 0, 0) };
        let plan = build(&[]).plan(&[handler]);
        assert_eq!((plan[0].open, plan[0].is_safe()), (3, false));
    }

    // Even with all deliveries done such a rename is not safe: a redelivery runs the handler again under its new key.
    #[test]
    fn a_removed_key_beside_a_new_one_may_be_a_rename_while_finished_messages_are_kept() {
        let mail = HandlerStatus { keeps_finished: true, ..stored("mail", &[], 0, 0) };
        let plan = build(&[("letters", &[])]).plan(std::slice::from_ref(&mail));
        assert_eq!(told(&plan), ["mail Removed false", "letters New true"]);
        assert_eq!(plan[0].may_be_renamed_to, ["letters"]);
        let told_of = |build: Manifest| told(&build.plan(std::slice::from_ref(&mail)));
        assert_eq!(told_of(build(&[("letters", &["mail"])])), ["mail Renamed { to: \"letters\" } true"]);
        assert_eq!(told_of(build(&[])), ["mail Removed true"]);
        let idle = build(&[("letters", &[])]).plan(&[stored("mail", &[], 0, 0)]);
        assert_eq!(told(&idle), ["mail Removed true", "letters New true"]);
    }

    #[test]
    fn a_rename_back_is_a_rename_and_a_removed_handler_with_poisoned_deliveries_is_not_safe() {
        let stored = [stored("new", &["old"], 5, 0), stored("gone", &[], 0, 2)];
        let plan = build(&[("old", &[])]).plan(&stored);
        assert_eq!(told(&plan), ["new Renamed { to: \"old\" } true", "gone Removed false"]);
    }
}

//! Compares a build's handler keys with what is stored: what the build keeps, renames, adds, and what it would leave behind.
//!
//! Pure. For a pipeline: write the new build's manifest to a file, compare it with production before the deploy.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::HandlerStatus;

/// The handler keys of a build. See [`Inbox::manifest`](crate::Inbox::manifest).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// Its handlers, in the order of registration.
    pub handlers: Vec<ManifestHandler>,
}

/// A handler of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ManifestHandler {
    /// Its key.
    pub key: String,
    /// Keys it had.
    #[serde(default)]
    pub formerly: Vec<String>,
}

/// What a build means for one handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedHandler {
    /// The stored handler's current key; for a new handler, its key.
    pub handler_key: String,
    /// What becomes of it.
    pub change: KeyChange,
    /// Deliveries that are pending or running.
    pub open: u64,
    /// Deliveries that were given up.
    pub poisoned: u64,
    /// For a removed handler whose finished deliveries are kept: keys that are new in the build. If one of them is its new name and does not say
    /// `formerly`, a redelivery adds a delivery under the new key, and the handler runs a second time.
    pub may_be_renamed_to: Vec<String>,
}

/// What a build does to a handler key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum KeyChange {
    /// The build has it.
    Kept,
    /// The build has it under this key.
    Renamed {
        /// The key of the build.
        to: String,
    },
    /// Nothing is stored for it yet.
    New,
    /// The build does not know it.
    Removed,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept => f.write_str("kept"),
            Self::Renamed { to } => write!(f, "renamed to {to}"),
            Self::New => f.write_str("new"),
            Self::Removed => f.write_str("removed"),
        }
    }
}

impl PlannedHandler {
    /// Whether nothing would be left behind and nothing run twice: deliveries of a key that no process knows are poisoned after a grace, poisoned
    /// ones cannot be replayed, and what a renamed handler has done is known only under the key it had.
    pub fn is_safe(&self) -> bool {
        self.change != KeyChange::Removed || (self.open + self.poisoned == 0 && self.may_be_renamed_to.is_empty())
    }
}

impl Manifest {
    /// What this build would mean for the handlers that are stored: those first, then the new ones.
    pub fn plan(&self, stored: &[HandlerStatus]) -> Vec<PlannedHandler> {
        let is_of = |entry: &ManifestHandler, handler: &HandlerStatus| {
            let keys = || std::iter::once(&handler.handler_key).chain(&handler.former_keys);
            keys().any(|key| *key == entry.key || entry.formerly.contains(key))
        };
        let is_new = |entry: &&ManifestHandler| !stored.iter().any(|handler| is_of(entry, handler));
        let new_keys: Vec<String> = self.handlers.iter().filter(is_new).map(|entry| entry.key.clone()).collect();
        let old = stored.iter().map(|handler| {
            let change = match self.handlers.iter().find(|entry| is_of(entry, handler)) {
                Some(entry) if entry.key == handler.handler_key => KeyChange::Kept,
                Some(entry) => KeyChange::Renamed { to: entry.key.clone() },
                None => KeyChange::Removed,
            };
            let is_doubtful = change == KeyChange::Removed && handler.keeps_finished;
            PlannedHandler {
                handler_key: handler.handler_key.clone(),
                may_be_renamed_to: if is_doubtful { new_keys.clone() } else { Vec::new() },
                change,
                open: handler.due + handler.later + handler.running,
                poisoned: handler.poisoned,
            }
        });
        let new = new_keys.iter().map(|key| PlannedHandler {
            handler_key: key.clone(),
            change: KeyChange::New,
            open: 0,
            poisoned: 0,
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
        serde_json::from_value(serde_json::json!({
            "handler_key": key, "former_keys": former, "due": open, "later": 0, "running": 0, "poisoned": poisoned,
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
    fn kept_renamed_new_and_removed_handlers_are_told_apart() {
        let stored = [stored("a", &[], 5, 0), stored("b", &[], 5, 0), stored("c", &[], 0, 0), stored("d", &[], 1, 0)];
        let plan = build(&[("a", &[]), ("b2", &["b"]), ("e", &[])]).plan(&stored);
        let expected =
            ["a Kept true", "b Renamed { to: \"b2\" } true", "c Removed true", "d Removed false", "e New true"];
        assert_eq!(told(&plan), expected);
    }

    // With everything done, the rename looked safe; a redelivery then ran the handler again under its new key.
    #[test]
    fn a_key_that_is_gone_beside_one_that_is_new_may_be_a_rename_while_finished_messages_are_kept() {
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
    fn a_rename_back_is_a_rename_and_poisoned_ones_are_not_left_behind() {
        let stored = [stored("new", &["old"], 5, 0), stored("gone", &[], 0, 2)];
        let plan = build(&[("old", &[])]).plan(&stored);
        assert_eq!(told(&plan), ["new Renamed { to: \"old\" } true", "gone Removed false"]);
    }
}

//! The `wharf` binary, run as a person or a script runs it, on each store: its output, its changes and its exit code.
#![allow(clippy::duplicate_mod, reason = "one suite runs on two stores")]

pub mod program;

macro_rules! every_store {
    () => {
        #[path = "../act.rs"]
        mod act;
        #[path = "../cleanup.rs"]
        mod cleanup;
        #[path = "../handlers.rs"]
        mod handlers;
        #[path = "../hostile.rs"]
        mod hostile;
        #[path = "../ledger.rs"]
        mod ledger;
        #[path = "../look.rs"]
        mod look;
        #[path = "../outbox.rs"]
        mod outbox;
        #[path = "../quarantine.rs"]
        mod quarantine;
    };
}

mod postgres {
    pub(crate) use crate::scene;

    every_store!();
    // These need a server, or do not depend on the store.
    mod audit;
    mod retention;
    mod secrets;
    mod terminal;
}

mod sqlite {
    pub(crate) use crate::conformance::sqlite::scene;

    every_store!();
    // These need files, or do not depend on the store.
    mod refusals;
}

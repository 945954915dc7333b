//! What every store must do the same way: each file of the suite is compiled for each store, and the name of a test tells which.
//!
//! The part of PostgreSQL is the core that is also run on its oldest and its newest version and through PgBouncer.
#![allow(clippy::duplicate_mod, reason = "that is how one suite runs on two stores")]

/// The files that are for every store.
macro_rules! suite {
    ($($name:ident $path:literal)*) => {
        $(#[path = $path] mod $name;)*
    };
}

macro_rules! every_store {
    () => {
        suite! {
            accept "../accept.rs"
            accept_in "../accept_in.rs"
            claim_ahead "../claim_ahead.rs"
            attempts "../attempts.rs"
            batch_charges "../batch_charges.rs"
            batches "../batches.rs"
            calls "../calls.rs"
            tx_batches "../tx_batches.rs"
            breaker "../breaker.rs"
            claims "../claims.rs"
            corrections "../corrections.rs"
            extremes "../extremes.rs"
            flow "../flow.rs"
            handler_errors "../handler_errors.rs"
            hostile "../hostile.rs"
            identity "../identity.rs"
            layers "../layers.rs"
            ledger "../ledger.rs"
            operate "../operate.rs"
            operate_steps "../operate_steps.rs"
            order "../order.rs"
            order_keys "../order_keys.rs"
            outbox "../outbox.rs"
            outcomes "../outcomes.rs"
            overview "../overview.rs"
            poison_hook "../poison_hook.rs"
            quarantine_ids "../quarantine_ids.rs"
            quarantine_replay "../quarantine_replay.rs"
            rate "../rate.rs"
            refused "../refused.rs"
            registration "../registration.rs"
            release "../release.rs"
            rename "../rename.rs"
            replay "../replay.rs"
            retention "../retention.rs"
            retention_identities "../retention_identities.rs"
            retention_kept "../retention_kept.rs"
            shared "../shared.rs"
            store_trouble "../store_trouble.rs"
            timing "../timing.rs"
            transactional "../transactional.rs"
        }
    };
}

pub mod postgres {
    pub(crate) use crate::{effect, scene};

    every_store!();
    // These need what only a server has: row locks, sessions, settings, schemas, functions.
    mod flow_races;
    mod retention_races;
    mod server;
    mod server_transactions;
    mod server_trouble;
}

pub mod sqlite {
    #[path = "../../batch_crash.rs"]
    mod batch_crash;
    #[path = "../../crash.rs"]
    mod crash;
    #[allow(dead_code, reason = "some of it is for what only PostgreSQL can do")]
    #[path = "../../effect.rs"]
    pub mod effect;
    mod kafka;
    #[path = "../../outage.rs"]
    mod outage;
    #[path = "../../panics.rs"]
    mod panics;
    #[path = "../../rates.rs"]
    mod rates;
    #[path = "../../unknown_keys.rs"]
    mod unknown_keys;
    #[path = "../../worker.rs"]
    pub mod worker;

    pub mod scene {
        pub use crate::scene::*;

        pub type Scene = Stage<Data>;
        pub type Data = support::sqlite::SqliteFile;
        pub type Db = wharf::Sqlite;
        pub type Connection = wharf::store::AsyncSqliteConnection;
        pub const WORKER: &str = "sqlite worker";
    }

    every_store!();
    // These need what only SQLite has: one writer, files, memory.
    mod files;
    mod one_writer;
}

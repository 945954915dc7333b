//! Behaviour that is the same in every store: each file of the suite is compiled for each store, whose name is in the
//! path of the test.
//!
//! The PostgreSQL part is the core, which also runs on the oldest and the newest supported version and through
//! PgBouncer.
#![allow(clippy::duplicate_mod, reason = "one suite runs on two stores")]

/// The files for every store.
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
            decoders "../decoders.rs"
            extremes "../extremes.rs"
            fair "../fair.rs"
            flow "../flow.rs"
            handler_errors "../handler_errors.rs"
            hostile "../hostile.rs"
            identity "../identity.rs"
            large "../large.rs"
            layers "../layers.rs"
            ledger "../ledger.rs"
            long_outage "../long_outage.rs"
            operate "../operate.rs"
            operate_steps "../operate_steps.rs"
            order "../order.rs"
            order_keys "../order_keys.rs"
            outbox "../outbox.rs"
            outcomes "../outcomes.rs"
            overview "../overview.rs"
            poison_hook "../poison_hook.rs"
            priority "../priority.rs"
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
            store_errors "../store_errors.rs"
            timing "../timing.rs"
            together "../together.rs"
            transactional "../transactional.rs"
        }
    };
}

pub mod postgres {
    pub(crate) use crate::{effect, scene};

    every_store!();
    // These need features of a server: row locks, sessions, settings, schemas, functions.
    mod fair_burst;
    mod flow_races;
    mod retention_races;
    mod server;
    mod server_errors;
    mod server_transactions;
}

pub mod sqlite {
    #[path = "../../batch_crash.rs"]
    mod batch_crash;
    #[path = "../../crash.rs"]
    mod crash;
    #[allow(dead_code, reason = "parts of it are for PostgreSQL only")]
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

        /// Every store has one.
        pub async fn with_one_handler_connection(scene: &Scene) -> wharf::Store<Db> {
            scene.another_store().await
        }
    }

    every_store!();
    // These need features of SQLite: one writer, files, memory.
    mod files;
    mod one_writer;
}

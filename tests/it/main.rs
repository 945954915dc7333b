//! A test for every guarantee of Wharf, which tries to break it, with a real PostgreSQL and real processes. It is one
//! binary, so that it is linked once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]
#![allow(unreachable_pub, reason = "a test binary exports nothing")]

mod any_client;
mod batch_crash;
mod batch_faults;
mod bound_functions;
mod cancel;
mod cli;
mod clock;
mod commit_in_doubt;
mod concurrent_accept;
mod conformance;
mod connection_shares;
mod connections;
mod counts;
mod crash;
mod credentials;
mod dashboard;
mod database_failures;
mod databases;
mod dependencies;
mod doctor;
mod documents;
mod effect;
mod events;
mod formats;
mod health;
mod incident;
mod kafka;
mod kafka_failures;
mod lease;
mod lost_replies;
mod metrics;
mod migrations;
mod operator_race;
mod order_history;
mod order_steps;
mod outage;
mod outbox;
mod own_server;
mod panics;
mod plans;
mod public_api;
mod quickstart;
mod rates;
mod roles;
mod scene;
mod session_settings;
mod shared_transactions;
mod shutdown;
mod test_support;
mod testing_kit;
mod testing_kit_postgres;
mod tidy;
mod traces;
mod unknown_keys;
mod worker;

/// The entry point of child processes: does nothing unless a parent has set a role.
#[test]
fn child_entry() {
    let of_kafka = [
        kafka::reader::ROLE,
        kafka_failures::ingester::ROLE,
        metrics::service::ROLE,
        outbox::link::ROLE,
        outbox::sender::ROLE,
        traces::through_kafka::ROLE,
    ];
    support::child::run_role(
        &[&[worker::ROLE, conformance::sqlite::worker::ROLE, any_client::ROLE, metrics::breaker::ROLE], &of_kafka[..]]
            .concat(),
    );
}

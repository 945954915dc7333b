//! Every claim Wharf makes, as a test that tries to break it, on a real PostgreSQL and with real processes. One binary, so that it
//! links once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "to fail is how a test reports")]
#![allow(unreachable_pub, reason = "nothing of a test binary is reachable from outside")]

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
mod database_trouble;
mod databases;
mod dependencies;
mod doctor;
mod documents;
mod effect;
mod events;
mod health;
mod incident;
mod kafka;
mod kafka_trouble;
mod lease;
mod lost_replies;
mod migrations;
mod operator_race;
mod order_history;
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
mod shared_transactions;
mod shutdown;
mod test_support;
mod testing_kit;
mod testing_kit_postgres;
mod tidy;
mod unknown_keys;
mod worker;

/// Where child processes begin: does nothing unless a parent asked for a role.
#[test]
fn child_entry() {
    let of_kafka = [kafka::reader::ROLE, kafka_trouble::ingester::ROLE, outbox::link::ROLE, outbox::sender::ROLE];
    support::child::run_role(
        &[&[worker::ROLE, conformance::sqlite::worker::ROLE, any_client::ROLE], &of_kafka[..]].concat(),
    );
}

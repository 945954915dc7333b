//! Each thing that can be wrong is named, and nothing that is not.

use std::time::UNIX_EPOCH;

use super::*;
use crate::types::{
    Connections, DeadClaims, GroupFacts, HeldKeys, IngestFacts, LongestRun, OldestTransaction, OutboxFacts,
    PartitionFacts, ProcessorReport, RelayFacts, TableFacts,
};

const SCHEMA: SchemaVersion = SchemaVersion { found: Some(1), known: 1 };

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

fn handler() -> HandlerStatus {
    HandlerStatus {
        handler_key: "stock".to_owned(),
        former_keys: Vec::new(),
        due: 0,
        later: 0,
        held: 0,
        running: 0,
        poisoned: 0,
        oldest_due_secs: None,
        next_due_at: None,
        paused_at: None,
        breaker_opened_at: None,
        breaker_error: None,
        rate_per_sec: None,
        rate_burst: None,
        is_rate_set: false,
        unknown_since: None,
        keeps_finished: false,
        is_ordered: false,
        processors: 1,
        done_per_sec: 0.0,
        failed_per_sec: 0.0,
    }
}

fn processor() -> ProcessorStatus {
    ProcessorStatus {
        id: 1,
        name: "host/1".to_owned(),
        version: "1".to_owned(),
        handler_keys: vec!["stock".to_owned()],
        started_at: now(),
        seen_at: now(),
        is_alive: true,
        running: 0,
        locked_until: None,
        report: None,
    }
}

fn facts() -> Facts {
    Facts {
        database: "PostgreSQL 15".to_owned(),
        is_read_only: false,
        unsafe_settings: Vec::new(),
        connections: Some(Connections { used: 5, max: 100 }),
        oldest_transaction: None,
        tables: Vec::new(),
        dead_claims: Vec::new(),
        lags: Vec::new(),
        held_keys: Vec::new(),
        groups: Vec::new(),
        partitions: Vec::new(),
        ingests: Vec::new(),
        outbox: OutboxFacts::default(),
        quarantined: 0,
        replay_asked_secs: None,
    }
}

/// The code of a symptom that was found here, not read.
fn code(symptom: Symptom) -> &'static str {
    match symptom.code {
        Cow::Borrowed(code) => code,
        Cow::Owned(code) => panic!("{code}"),
    }
}

fn codes_of_handler(handler: HandlerStatus, processors: &[ProcessorStatus]) -> Vec<&'static str> {
    judge(SCHEMA, Some(&facts()), &[handler], processors, now()).into_iter().map(code).collect()
}

fn codes_of_facts(facts: &Facts) -> Vec<&'static str> {
    judge(SCHEMA, Some(facts), &[handler()], &[processor()], now()).into_iter().map(code).collect()
}

#[test]
fn a_healthy_inbox_has_no_symptom() {
    assert_eq!(codes_of_handler(HandlerStatus { due: 5, running: 16, ..handler() }, &[processor()]), [""; 0]);
}

#[test]
fn each_reason_why_a_handler_does_not_move_is_named() {
    let with = |handler: HandlerStatus| codes_of_handler(handler, &[processor()]);
    assert_eq!(with(HandlerStatus { poisoned: 3, ..handler() }), ["poisoned"]);
    assert_eq!(with(HandlerStatus { due: 3, paused_at: Some(now()), ..handler() }), ["paused"]);
    assert_eq!(with(HandlerStatus { later: 3, breaker_opened_at: Some(now()), ..handler() }), ["breaker open"]);
    assert_eq!(with(HandlerStatus { due: 3, processors: 0, ..handler() }), ["unknown key"]);
    assert_eq!(with(HandlerStatus { later: 3, next_due_at: Some(now()), ..handler() }), ["backoff"]);
    assert_eq!(with(HandlerStatus { due: 3, running: 1, oldest_due_secs: Some(1e4), ..handler() }), ["slow"]);
    // What is paused is not said to be unknown as well.
    let paused = HandlerStatus { due: 3, processors: 0, paused_at: Some(now()), ..handler() };
    assert_eq!(with(paused), ["paused"]);
}

#[test]
fn who_is_to_blame_when_nobody_is_alive_is_said() {
    let waiting = HandlerStatus { due: 3, processors: 0, ..handler() };
    let symptoms = judge(SCHEMA, None, &[waiting], &[], now());
    assert!(symptoms[0].advice.contains("start the service"), "{symptoms:?}");
}

#[test]
fn each_trouble_of_the_database_is_named() {
    assert_eq!(codes_of_facts(&Facts { is_read_only: true, ..facts() }), ["read-only"]);
    assert_eq!(
        codes_of_facts(&Facts { unsafe_settings: vec!["fsync = off".to_owned()], ..facts() }),
        ["unsafe durability"]
    );
    assert_eq!(
        codes_of_facts(&Facts { connections: Some(Connections { used: 95, max: 100 }), ..facts() }),
        ["connections"]
    );
    let held = HeldKeys { handler_key: "stock".to_owned(), keys: 1, behind: 7 };
    assert_eq!(codes_of_facts(&Facts { held_keys: vec![held], ..facts() }), ["held keys"]);
    let oldest = Some(OldestTransaction { secs: 7200.0, who: "psql".to_owned() });
    assert_eq!(codes_of_facts(&Facts { oldest_transaction: oldest, ..facts() }), ["held snapshot"]);
    let table = TableFacts { name: "inbox_delivery".to_owned(), live: 10, dead: 1_000_000 };
    assert_eq!(codes_of_facts(&Facts { tables: vec![table], ..facts() }), ["dead rows"]);
    let dead = DeadClaims {
        handler_key: "stock".to_owned(),
        processor: None,
        claims: 16,
        until: now() + Duration::from_secs(21),
    };
    assert_eq!(codes_of_facts(&Facts { dead_claims: vec![dead], ..facts() }), ["dead process"]);
    assert_eq!(codes_of_facts(&Facts { quarantined: 2, ..facts() }), ["quarantine"]);
    assert_eq!(codes_of_facts(&Facts { replay_asked_secs: Some(600.0), ..facts() }), ["replay waits"]);
    let partition = |standing: &str| PartitionFacts {
        consumer_group: "shop".to_owned(),
        topic: "orders".to_owned(),
        partition: 3,
        standing: standing.to_owned(),
        secs: 90.0,
        why: Some("the log was truncated".to_owned()),
    };
    let of_partition = |standing| codes_of_facts(&Facts { partitions: vec![partition(standing)], ..facts() });
    assert_eq!(of_partition("stopped"), ["partition stopped"]);
    assert_eq!(of_partition("standing still"), ["partition stands still"]);
    assert_eq!(of_partition("waiting"), ["partition waits"]);
    let ingest = |seen_secs_ago, trouble: Option<&str>| IngestFacts {
        consumer_group: "shop".to_owned(),
        name: "host/7".to_owned(),
        seen_secs_ago,
        trouble: trouble.map(str::to_owned),
        trouble_secs: None,
    };
    let of_ingests = |ingests| codes_of_facts(&Facts { ingests, ..facts() });
    assert_eq!(of_ingests(vec![ingest(3.0, Some("authentication failed"))]), ["kafka trouble"]);
    assert_eq!(of_ingests(vec![ingest(300.0, None)]), ["ingest dead"]);
    // Another process has taken over.
    assert_eq!(of_ingests(vec![ingest(300.0, None), ingest(3.0, None)]), [""; 0]);
    let group = GroupFacts { consumer_group: "shop".to_owned(), partitions: 1, moved_secs_ago: 1.0, gaps: 1 };
    assert_eq!(codes_of_facts(&Facts { groups: vec![group], ..facts() }), ["gaps"]);
}

#[test]
fn what_a_process_says_of_itself_is_judged_while_it_is_alive() {
    let report = ProcessorReport {
        is_intake_open: Some(false),
        pool_in_use: 10,
        pool_size: 10,
        pool_waiting: 3,
        ..ProcessorReport::default()
    };
    let complaining = ProcessorStatus { report: Some(report), ..processor() };
    assert_eq!(codes_of_handler(handler(), std::slice::from_ref(&complaining)), ["intake closed", "pool exhausted"]);
    assert_eq!(codes_of_handler(handler(), &[ProcessorStatus { is_alive: false, ..complaining }]), [""; 0]);
}

#[test]
fn a_process_that_reads_nothing_goes_on_by_itself_or_says_what_it_needs() {
    let report = ProcessorReport { is_intake_open: Some(false), ..ProcessorReport::default() };
    let closed = ProcessorStatus { report: Some(report), ..processor() };
    let symptoms = |ingests: &[(f64, Option<&str>)]| {
        let ingest = |&(seen_secs_ago, trouble): &(f64, Option<&str>)| IngestFacts {
            consumer_group: "shop".to_owned(),
            name: closed.name.clone(),
            seen_secs_ago,
            trouble: trouble.map(str::to_owned),
            trouble_secs: trouble.map(|_| 5.0),
        };
        let facts = Facts { ingests: ingests.iter().map(ingest).collect(), ..facts() };
        judge(SCHEMA, Some(&facts), &[handler()], std::slice::from_ref(&closed), now())
    };
    let told = |ingests: &[(f64, Option<&str>)]| -> Vec<String> {
        symptoms(ingests).iter().map(|symptom| format!("{}: {}", symptom.code, symptom.advice)).collect()
    };
    assert!(told(&[(3.0, None)])[0].starts_with("intake closed: it goes on by itself"));
    // Its ingest has failed: it gives no sign of life, and the process does.
    assert!(told(&[(30.0, None)])[0].contains("restart the process"));
    assert!(told(&[])[0].contains("restart the process"));
    let stopped = told(&[(3.0, Some("intake is stopped: the last 1000 records of topic orders were all quarantined"))]);
    assert!(stopped[0].starts_with("intake closed: it goes on when"), "{stopped:?}");
    assert!(stopped[1].starts_with("intake stopped: wharf quarantine list"), "{stopped:?}");
}

#[test]
fn a_run_that_takes_very_long_is_named() {
    let codes = |secs, timeout_secs| {
        let run = LongestRun { handler_key: "stock".to_owned(), message_id: Some("a".to_owned()), secs, timeout_secs };
        let report = ProcessorReport { longest_run: Some(run), ..ProcessorReport::default() };
        codes_of_handler(handler(), &[ProcessorStatus { report: Some(report), ..processor() }])
    };
    assert_eq!(codes(601.0, None), ["long run"]);
    assert_eq!(codes(599.0, None), [""; 0]);
    assert_eq!((codes(61.0, Some(30.0)), codes(601.0, Some(900.0))), (vec!["long run"], vec![]));
}

#[test]
fn a_schema_that_does_not_fit_comes_first() {
    let codes = |found| code(judge(SchemaVersion { found, known: 2 }, None, &[], &[], now()).remove(0));
    assert_eq!([None, Some(1), Some(3)].map(codes), ["no inbox", "migrations pending", "newer schema"]);
}

#[test]
fn a_diagnosis_that_was_written_as_json_is_read_back() {
    let (handlers, processors, facts) = (vec![HandlerStatus { due: 5, ..handler() }], vec![processor()], facts());
    let symptoms = judge(SchemaVersion { found: Some(1), known: 2 }, Some(&facts), &handlers, &[], now());
    assert!(!symptoms.is_empty());
    let diagnosis = Diagnosis { symptoms, handlers, processors, facts: Some(facts) };
    let text = serde_json::to_string(&diagnosis).unwrap();
    assert_eq!(serde_json::from_str::<Diagnosis>(&text).unwrap(), diagnosis, "{text}");
}

#[test]
fn records_that_are_not_sent_are_named_with_what_keeps_them() {
    let codes = |outbox: OutboxFacts| -> Vec<String> {
        let facts = Facts { outbox, ..facts() };
        judge(SCHEMA, Some(&facts), &[], &[], now()).into_iter().map(|symptom| symptom.code.into_owned()).collect()
    };
    let waiting = || OutboxFacts { waiting: 3, oldest_secs: Some(400.0), ..OutboxFacts::default() };
    let relay = |trouble: Option<&str>| RelayFacts {
        name: "host/1".to_owned(),
        slots: 16,
        trouble: trouble.map(str::to_owned),
        trouble_secs: Some(5.0),
    };
    assert!(codes(OutboxFacts::default()).is_empty());
    assert_eq!(codes(OutboxFacts { poisoned: 1, ..OutboxFacts::default() }), ["outbox poisoned"]);
    assert_eq!(codes(waiting()), ["no relay"]);
    assert_eq!(codes(OutboxFacts { relays: vec![relay(Some("no broker answers"))], ..waiting() }), ["relay trouble"]);
    assert_eq!(codes(OutboxFacts { relays: vec![relay(None)], ..waiting() }), ["outbox slow"]);
    assert!(codes(OutboxFacts { relays: vec![relay(None)], oldest_secs: Some(1.0), ..waiting() }).is_empty());
}

//! Each possible problem is reported, and a healthy inbox has no symptoms.

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
        keys_by_id: Vec::new(),
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
        effective_lag_secs: None,
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

/// The code of a symptom that `judge` returned; deserialized symptoms have an owned code.
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
    // A paused handler is not reported as unknown as well.
    let paused = HandlerStatus { due: 3, processors: 0, paused_at: Some(now()), ..handler() };
    assert_eq!(with(paused), ["paused"]);
}

#[test]
fn the_advice_without_any_live_process_is_to_start_the_service() {
    let waiting = HandlerStatus { due: 3, processors: 0, ..handler() };
    let symptoms = judge(SCHEMA, None, &[waiting], &[], now());
    assert!(symptoms[0].advice.contains("start the service"), "{symptoms:?}");
}

#[test]
fn each_problem_of_the_database_is_named() {
    assert_eq!(codes_of_facts(&Facts { is_read_only: true, ..facts() }), ["read-only"]);
    assert_eq!(
        codes_of_facts(&Facts { unsafe_settings: vec!["fsync = off".to_owned()], ..facts() }),
        ["unsafe durability"]
    );
    assert_eq!(
        codes_of_facts(&Facts { connections: Some(Connections { used: 95, max: 100 }), ..facts() }),
        ["connections"]
    );
    let held = |state| HeldKeys {
        handler_key: "stock".to_owned(),
        state,
        keys: 1,
        message_id: Some("a1".to_owned()),
        behind: 7,
    };
    let held_keys = vec![held(State::Pending), held(State::Poisoned)];
    assert_eq!(codes_of_facts(&Facts { held_keys, ..facts() }), ["held keys", "keys wait for a retry"]);
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
    let partition = |state: &str| PartitionFacts {
        cluster_id: "c1".to_owned(),
        consumer_group: "shop".to_owned(),
        topic: "orders".to_owned(),
        partition: 3,
        state: state.to_owned(),
        secs: 90.0,
        why: Some("the log was truncated".to_owned()),
    };
    let advice = |why: Option<&str>| {
        let waiting = PartitionFacts { why: why.map(str::to_owned), ..partition("waiting") };
        let facts = Facts { partitions: vec![waiting], ..facts() };
        judge(SCHEMA, Some(&facts), &[handler()], &[processor()], now()).remove(0).advice
    };
    assert!(advice(None).contains("has a leader") && advice(Some("answers 503")).contains("schema registry"));
    let of_partition = |state| codes_of_facts(&Facts { partitions: vec![partition(state)], ..facts() });
    assert_eq!(of_partition("stopped"), ["partition stopped"]);
    assert_eq!(of_partition("blocked"), ["partition blocked"]);
    assert_eq!(of_partition("refused"), ["partition refused"]);
    assert_eq!(of_partition("waiting"), ["partition waits"]);
    let ingest = |seen_secs_ago, problem: Option<&str>| IngestFacts {
        consumer_group: "shop".to_owned(),
        name: "host/7".to_owned(),
        source: "shop".to_owned(),
        cluster_id: "c1".to_owned(),
        seen_secs_ago,
        problem: problem.map(str::to_owned),
        problem_secs: None,
    };
    let of_ingests = |ingests| codes_of_facts(&Facts { ingests, ..facts() });
    assert_eq!(of_ingests(vec![ingest(3.0, Some("authentication failed"))]), ["kafka error"]);
    assert_eq!(of_ingests(vec![ingest(300.0, None)]), ["ingest dead"]);
    // Another process has taken over.
    assert_eq!(of_ingests(vec![ingest(300.0, None), ingest(3.0, None)]), [""; 0]);
    let group =
        GroupFacts { consumer_group: "shop".to_owned(), partitions: 1, clusters: 1, moved_secs_ago: 1.0, gaps: 1 };
    assert_eq!(codes_of_facts(&Facts { groups: vec![group], ..facts() }), ["gaps"]);
}

#[test]
fn a_symptom_that_concerns_a_handler_has_its_key() {
    let handler_key = || "stock".to_owned();
    let held = |state| HeldKeys { handler_key: handler_key(), state, keys: 1, message_id: None, behind: 7 };
    let dead = DeadClaims { handler_key: handler_key(), processor: None, claims: 16, until: now() };
    let facts = Facts {
        held_keys: vec![held(State::Pending), held(State::Poisoned)],
        dead_claims: vec![dead],
        quarantined: 2,
        ..facts()
    };
    let handler = HandlerStatus { poisoned: 3, ..handler() };
    let symptoms = judge(SCHEMA, Some(&facts), &[handler], &[processor()], now());
    let keys: Vec<_> = symptoms.iter().map(|symptom| (&*symptom.code, symptom.handler_key.as_deref())).collect();
    let stock = Some("stock");
    assert_eq!(
        keys,
        [
            ("poisoned", stock),
            ("held keys", stock),
            ("dead process", stock),
            ("quarantine", None),
            ("keys wait for a retry", stock),
        ]
    );
}

#[test]
fn the_report_of_a_process_counts_only_while_it_is_alive() {
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
fn the_advice_for_closed_intake_depends_on_why_it_is_closed() {
    let report = ProcessorReport { is_intake_open: Some(false), ..ProcessorReport::default() };
    let closed = ProcessorStatus { report: Some(report), ..processor() };
    let symptoms = |ingests: &[(f64, Option<&str>)]| {
        let ingest = |&(seen_secs_ago, problem): &(f64, Option<&str>)| IngestFacts {
            consumer_group: "shop".to_owned(),
            name: closed.name.clone(),
            source: "shop".to_owned(),
            cluster_id: "c1".to_owned(),
            seen_secs_ago,
            problem: problem.map(str::to_owned),
            problem_secs: problem.map(|_| 5.0),
        };
        let facts = Facts { ingests: ingests.iter().map(ingest).collect(), ..facts() };
        judge(SCHEMA, Some(&facts), &[handler()], std::slice::from_ref(&closed), now())
    };
    let told = |ingests: &[(f64, Option<&str>)]| -> Vec<String> {
        symptoms(ingests).iter().map(|symptom| format!("{}: {}", symptom.code, symptom.advice)).collect()
    };
    assert!(told(&[(3.0, None)])[0].starts_with("intake closed: it resumes by itself"));
    // The ingest has failed: the process still reports, its ingest does not.
    assert!(told(&[(30.0, None)])[0].contains("restart the process"));
    assert!(told(&[])[0].contains("restart the process"));
    let stopped = told(&[(3.0, Some("intake is stopped: the last 1000 records of topic orders were all quarantined"))]);
    assert!(stopped[0].starts_with("intake closed: it resumes when"), "{stopped:?}");
    assert!(stopped[1].starts_with("intake stopped: wharf quarantine list"), "{stopped:?}");
}

#[test]
fn a_problem_of_one_source_of_several_names_it_and_its_cluster() {
    let report = ProcessorReport {
        is_intake_open: Some(true),
        closed_sources: vec!["eu".to_owned()],
        ..ProcessorReport::default()
    };
    let closed = ProcessorStatus { report: Some(report), ..processor() };
    let ingest = |source: &str, problem: Option<&str>| IngestFacts {
        consumer_group: "shop".to_owned(),
        name: closed.name.clone(),
        source: source.to_owned(),
        cluster_id: "c1".to_owned(),
        seen_secs_ago: 3.0,
        problem: problem.map(str::to_owned),
        problem_secs: problem.map(|_| 5.0),
    };
    let partition = PartitionFacts {
        consumer_group: "shop".to_owned(),
        topic: "orders".to_owned(),
        partition: 3,
        cluster_id: "c2".to_owned(),
        state: "stopped".to_owned(),
        secs: 90.0,
        why: None,
    };
    let group =
        GroupFacts { consumer_group: "shop".to_owned(), partitions: 2, clusters: 2, moved_secs_ago: 1.0, gaps: 0 };
    let facts = Facts {
        ingests: vec![ingest("eu", Some("authentication failed")), ingest("us", None)],
        partitions: vec![partition],
        groups: vec![group],
        ..facts()
    };
    let symptoms = judge(SCHEMA, Some(&facts), &[handler()], std::slice::from_ref(&closed), now());
    let told: Vec<String> = symptoms.iter().map(|symptom| format!("{}; {}", symptom.what, symptom.advice)).collect();
    let tells = |words: &str| told.iter().any(|told| told.contains(words));
    assert!(tells("reads nothing from source eu"), "{told:?}");
    assert!(tells("cannot read for source eu (group shop), for 5s: authentication failed"), "{told:?}");
    assert!(tells("orders[3] of group shop on cluster c2"), "{told:?}");
    assert!(tells("--partition 3 --cluster c2 --to OFFSET"), "{told:?}");
    assert!(!tells("source us"), "{told:?}");
}

#[test]
fn a_run_that_takes_very_long_is_reported() {
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
fn an_incompatible_schema_is_reported_first() {
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
fn records_that_are_not_sent_are_reported_with_the_cause() {
    let codes = |outbox: OutboxFacts| -> Vec<String> {
        let facts = Facts { outbox, ..facts() };
        judge(SCHEMA, Some(&facts), &[], &[], now()).into_iter().map(|symptom| symptom.code.into_owned()).collect()
    };
    let waiting = || OutboxFacts { waiting: 3, oldest_secs: Some(400.0), ..OutboxFacts::default() };
    let relay = |problem: Option<&str>| RelayFacts {
        name: "host/1".to_owned(),
        slots: 16,
        problem: problem.map(str::to_owned),
        problem_secs: Some(5.0),
    };
    assert!(codes(OutboxFacts::default()).is_empty());
    assert_eq!(codes(OutboxFacts { poisoned: 1, ..OutboxFacts::default() }), ["outbox poisoned"]);
    assert_eq!(codes(waiting()), ["no relay"]);
    assert_eq!(codes(OutboxFacts { relays: vec![relay(Some("no broker answers"))], ..waiting() }), ["relay error"]);
    assert_eq!(codes(OutboxFacts { relays: vec![relay(None)], ..waiting() }), ["outbox slow"]);
    assert!(codes(OutboxFacts { relays: vec![relay(None)], oldest_secs: Some(1.0), ..waiting() }).is_empty());
}

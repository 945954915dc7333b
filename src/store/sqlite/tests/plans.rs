//! No statement of accepting, claiming, settling and upkeep reads a whole table, whatever SQLite's planner prefers.
//!
//! The statements are those that a connection executes while the store's functions work on it, and those of the
//! triggers. PostgreSQL: `tests/it/plans.rs`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::InstrumentationEvent;
use diesel::sql_types::Text;
use diesel::{Connection, QueryableByName, RunQueryDsl, SqliteConnection, sql_query};

use super::super::{accept, migrate, process, register, upkeep};
use super::{batch, new_delivery, new_message};
use crate::store::seam::{
    Ask, AskedRate, ClaimId, ClaimRequest, ClaimScope, HandlerIds, NewDelivery, NewMessage, Order, ProcessorInfo,
    ScanFrom, Settlement, Settler, WantedHandler,
};
use crate::types::{FailedBy, Outcome, PoisonReason};

/// Tables with a row for each handler, key, process or setting, and the names that statements give them. `o` is a
/// subquery with a limit.
const SMALL: [&str; 9] = ["own", "same", "h", "p", "k", "o", "inbox_handler", "inbox_clock", "inbox_processor"];

/// Parts of the statements that sort a bounded number of rows.
const SORTING: [&str; 3] = [
    // A promotion: the first held delivery of one key, of each id of its handler.
    "CROSS JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)",
    // A claim in order: the deliveries of one key that are not held, so its head, and poisoned ones that block it.
    "ORDER BY d.status = 3 OR d.locked_until",
    // For people: the 1,000 oldest held deliveries of each handler, and the 1,000 that have been poisoned longest.
    "inbox_held_keys",
];

#[derive(QueryableByName)]
struct PlanStep {
    #[diesel(sql_type = Text)]
    detail: String,
}

#[derive(QueryableByName)]
struct Trigger {
    #[diesel(sql_type = Text)]
    sql: String,
}

/// The steps of a statement's plan that read all rows of a table that can be large, or that sort. A sort reads all rows
/// before the limit of the statement applies, for example a whole backlog through an index.
fn scans(conn: &mut SqliteConnection, statement: &str) -> Vec<String> {
    let steps: Vec<PlanStep> = sql_query(format!("EXPLAIN QUERY PLAN {statement}")).load(conn).unwrap();
    let scans_large = |detail: &String| {
        if detail.starts_with("USE TEMP B-TREE") {
            return !SORTING.iter().any(|part| statement.contains(part));
        }
        let Some(scanned) = detail.strip_prefix("SCAN ") else { return false };
        let name = scanned.split(' ').next().unwrap_or_default();
        // A subquery, or an array that was given as JSON.
        !name.starts_with('(') && !scanned.contains("VIRTUAL TABLE") && !SMALL.contains(&name)
    };
    steps.into_iter().map(|step| step.detail).filter(scans_large).collect()
}

fn connect() -> SqliteConnection {
    let mut conn = SqliteConnection::establish(":memory:").unwrap();
    migrate::migrate(&mut conn).unwrap();
    conn
}

/// Two keys that became one handler, so that deliveries of a key are found under both ids.
fn ordered(conn: &mut SqliteConnection) -> HandlerIds {
    let order = Some(Order { passes_poisoned: false });
    let wanted = |key: &str| WantedHandler { key: key.to_owned(), order, ..WantedHandler::default() };
    let renamed = WantedHandler { former_keys: vec!["old".to_owned(), "older".to_owned()], ..wanted("new") };
    register::register(conn, &[wanted("old"), wanted("older")]).unwrap();
    register::register(conn, &[renamed]).unwrap().remove(0)
}

fn message(ids: &HandlerIds, number: usize) -> NewMessage {
    let hash = Some(i64::try_from(number % 4).unwrap());
    new_message(format!("m{number}"), NewDelivery { order_hash: hash, fair_hash: hash, ..new_delivery(ids) })
}

fn accept_all(conn: &mut SqliteConnection, ids: &HandlerIds) {
    let batch = batch((0..12).map(|number| message(ids, number)).collect());
    accept::accept(conn, Instant::now(), &batch).unwrap();
}

fn claim(conn: &mut SqliteConnection, ids: &HandlerIds, after: Option<i64>, scope: ClaimScope) -> Vec<ClaimId> {
    let of = |&handler_id: &i16| Ask {
        handler_id,
        limit: 10,
        after,
        from: ScanFrom::Beginning,
        is_probe: false,
        rate: AskedRate::Limited(handler_id),
    };
    let request = ClaimRequest {
        processor: 1,
        lease: Duration::from_secs(60),
        asks: ids.all.iter().map(of).collect(),
        scope,
        ordered_ids: if after.is_none() { ids.all.to_vec() } else { Vec::new() },
        suspect_from_crashes: 2,
        suspect_from_store_errors: 1,
        with_ages: true,
        payload_bytes_max: i32::MAX,
    };
    let claims = process::claim(conn, Instant::now(), &request).unwrap();
    claims.deliveries.iter().map(|claimed| claimed.claim).collect()
}

fn settle(conn: &mut SqliteConnection, claims: &[ClaimId]) {
    let outcomes = [
        Outcome::Done,
        Outcome::Retry { after: Duration::ZERO, by: FailedBy::Error, error: "again".to_owned() },
        Outcome::Poisoned { reason: PoisonReason::Permanent, error: Some("no".to_owned()), charged: true },
        Outcome::Released,
    ];
    let settlements: Vec<Settlement> =
        claims.iter().zip(outcomes).map(|(&claim, outcome)| Settlement { claim, outcome }).collect();
    let settler = Settler { processor: 1, attempt_rows_max: 20, ordered_ids: Vec::new() };
    // The second time they have taken effect.
    for _ in 0..2 {
        assert!(process::settle(conn, &settler, &settlements).unwrap().is_empty());
    }
}

/// Every statement of the engine's hot paths.
fn work(conn: &mut SqliteConnection) {
    let ids = ordered(conn);
    let (name, handler_ids) = ("test".into(), ids.all.to_vec());
    let processor = ProcessorInfo { name, handler_ids, ttl: Duration::from_secs(60), report: "{}".to_owned() };
    let (id, _) = upkeep::register_processor(conn, &processor).unwrap();
    upkeep::heartbeat(conn, id, &processor).unwrap();
    accept_all(conn, &ids);
    // The second time they are known.
    accept_all(conn, &ids);
    let claimed = claim(conn, &ids, None, ClaimScope::All);
    assert_eq!(claimed.len(), 4, "one of each key");
    process::renew(conn, Instant::now(), &[(claimed[0], Duration::from_secs(60))]).unwrap();
    process::release_handed_over(conn, &[(claimed[0].message_seq, claimed[0].handler_id)], 7).unwrap();
    settle(conn, &claimed);
    claim(conn, &ids, Some(0), ClaimScope::All);
    upkeep::backlog(conn, &ids.all, 100).unwrap();
    upkeep::expire(conn, &ids.all, Duration::from_secs(60), 100).unwrap();
    upkeep::check_unknown(conn, id, Duration::ZERO, 100).unwrap();
    upkeep::remove_processor(conn, id).unwrap();
    upkeep::check_unknown(conn, 0, Duration::ZERO, 100).unwrap();
}

#[test]
fn no_statement_of_the_engine_reads_a_whole_table() {
    let mut conn = connect();
    let executed = Arc::new(Mutex::new(BTreeSet::new()));
    let noted = Arc::clone(&executed);
    conn.set_instrumentation(move |event: InstrumentationEvent<'_>| {
        if let InstrumentationEvent::StartQuery { query, .. } = event {
            let text = query.to_string();
            noted.lock().unwrap().insert(text.split(" -- binds: ").next().unwrap().to_owned());
        }
    });
    work(&mut conn);
    let executed = std::mem::take(&mut *executed.lock().unwrap());

    for name in ["inbox_delivery_order", "'expired'", "'unknown key'", "inbox_delivery_fair"] {
        assert!(executed.iter().any(|statement| statement.contains(name)), "no statement has {name}");
    }
    for statement in executed.iter().filter(|statement| statement.contains("inbox_delivery")) {
        assert_eq!(scans(&mut conn, statement), Vec::<String>::new(), "{statement}");
    }
}

#[test]
fn no_trigger_and_no_view_of_doctor_reads_a_whole_table() {
    let mut conn = connect();
    let triggers: Vec<Trigger> =
        sql_query("SELECT sql FROM sqlite_schema WHERE type = 'trigger' AND sql LIKE '%inbox_delivery%'")
            .load(&mut conn)
            .unwrap();
    assert!(triggers.iter().any(|trigger| trigger.sql.contains("inbox_promote_next_of_deleted")));
    for Trigger { sql } in triggers {
        let body = sql.split_once("\nBEGIN").unwrap().1.rsplit_once("END").unwrap().0;
        let body = body.replace("OLD.", ":old_").replace("NEW.", ":new_");
        let statements = body.split(';').filter(|statement| statement.contains("inbox_delivery"));
        for statement in statements {
            assert_eq!(scans(&mut conn, statement), Vec::<String>::new(), "{statement}");
        }
    }
    for view in ["inbox_backlog", "inbox_held_keys", "inbox_head"] {
        // `f` are the keys that a subquery has found.
        let of_view: Vec<String> = scans(&mut conn, &format!("SELECT * FROM {view}"));
        assert!(of_view.iter().all(|step| step == "SCAN f"), "{view}: {of_view:?}");
    }
}

#[test]
fn doctor_does_not_read_the_deliveries_that_wait_for_their_order_key() {
    let mut conn = connect();
    ordered(&mut conn);
    let rows = "INSERT INTO inbox_delivery (message_seq, handler_id, status, due_at)
                VALUES (1, 1, 0, 5), (2, 1, 0, 9223372036854775807), (3, 1, 0, 9223372036854775807)";
    sql_query(rows).execute(&mut conn).unwrap();
    let found = "SELECT group_concat(message_seq) AS detail FROM inbox_head";
    let found: PlanStep = sql_query(found).get_result(&mut conn).unwrap();
    assert_eq!(found.detail, "1");
}

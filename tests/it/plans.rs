//! The cost of a statement is that of its batch, whatever the tables hold and whatever statistics the planner has.
//!
//! Proved on the plans the server itself writes down while a real inbox works beside hundreds of thousands of rows. Pages are
//! counted, never time.

mod big;
mod drive;
mod explained;
mod outbox;

use std::time::Duration;

use wharf::dashboard::{Access, Dashboard};
use wharf::flow::{FairKey, RateLimit};
use wharf::operate::QuarantineFilter;
use wharf::order::OrderKey;
use wharf::{Failure, Inbox, Limits, Message, Raw, Record, handler};

use crate::dashboard::forms;
use crate::scene::{Runs, Scene, key, quick, record, records};
use big::{Big, Statistics};
use drive::{STATEMENTS, every_statement};
use explained::reads_by_index;
use support::postgres::connect;

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_a_whole_table_by_stale_statistics_and_custom_plans() {
    no_statement_reads_a_whole_table("stale_custom", Statistics::Stale, "force_custom_plan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_a_whole_table_by_stale_statistics_and_generic_plans() {
    no_statement_reads_a_whole_table("stale_generic", Statistics::Stale, "force_generic_plan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_a_whole_table_by_fresh_statistics_and_custom_plans() {
    no_statement_reads_a_whole_table("fresh_custom", Statistics::Fresh, "force_custom_plan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_a_whole_table_by_fresh_statistics_and_generic_plans() {
    no_statement_reads_a_whole_table("fresh_generic", Statistics::Fresh, "force_generic_plan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_a_whole_table_by_statistics_of_an_idle_moment_and_custom_plans() {
    no_statement_reads_a_whole_table("idle_custom", Statistics::Idle, "force_custom_plan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_a_whole_table_by_statistics_of_an_idle_moment_and_generic_plans() {
    no_statement_reads_a_whole_table("idle_generic", Statistics::Idle, "force_generic_plan").await;
}

async fn no_statement_reads_a_whole_table(name: &str, statistics: Statistics, plan_cache_mode: &str) {
    let big = Big::full(name).await;
    big.execute(&format!("ALTER DATABASE {name} SET plan_cache_mode = {plan_cache_mode}")).await;
    big.learn(statistics).await;
    let from = big.log_length();

    every_statement(&big, name, plan_cache_mode).await;

    let plans = big.plans(from);
    for (what, piece) in STATEMENTS {
        assert!(plans.iter().any(|plan| plan.sql.contains(piece)), "{what} was never executed");
    }
    let offences: Vec<String> = plans.iter().flat_map(explained::Plan::offences).collect();
    let kinds = STATEMENTS.map(|(what, piece)| (what, offences.iter().filter(|text| text.contains(piece)).count()));
    assert!(offences.is_empty(), "{kinds:?}\n{}", offences[0]);
}

// A session keeps the plans of its first calls, and no ANALYZE comes to the aid of a new inbox in its first minute.
#[tokio::test(flavor = "multi_thread")]
async fn plans_that_were_made_while_the_tables_were_empty_do_not_read_them_whole_when_they_have_grown() {
    let big = Big::almost_empty("grown").await;
    let runs = Runs::new();
    let inbox = Inbox::builder(big.store().await)
        .subscribe("orders", runs.handler("plain").concurrency(200))
        .subscribe("orders", runs.handler("sorted").concurrency(200).ordered_by(OrderKey::record_key()))
        .subscribe("orders", runs.handler("fair").concurrency(200).fair_by(FairKey::record_key()))
        .subscribe("orders", runs.handler("metered").concurrency(200).rate(RateLimit::per_second(10_000).burst(5_000)))
        .build()
        .unwrap();
    let from = big.log_length();
    let keyed = |id: String, number: usize| record(&id).with_key(format!("k{}", number % 100));
    for round in 0..3 {
        inbox.accept_all((0..3).map(|n| keyed(format!("few-{round}-{n}"), n))).await.unwrap();
        inbox.drain().await.unwrap();
    }
    inbox.accept_all((0..3_000).map(|n| keyed(format!("many-{n}"), n))).await.unwrap();
    inbox.drain().await.unwrap();

    let plans = big.plans(from);
    assert!(plans.iter().filter(|plan| plan.rows() >= 100.0).count() >= 40, "{} plans", plans.len());
    let offences: Vec<String> = plans.iter().flat_map(explained::Plan::offences).collect();
    assert!(offences.is_empty(), "{} of {}\n{}", offences.len(), plans.len(), offences[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn poisoned_deliveries_are_listed_by_their_index() {
    let big = Big::full("poisoned").await;
    for statistics in [Statistics::Stale, Statistics::Fresh] {
        big.learn(statistics).await;
        let explained = big.explain("SELECT * FROM inbox_poisoned").await;
        assert!(
            reads_by_index(&explained, "inbox_delivery", "inbox_delivery_poisoned"),
            "{statistics:?}: {explained:#}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deliveries_of_a_message_are_found_by_its_id() {
    let big = Big::full("found").await;
    for statistics in [Statistics::Stale, Statistics::Fresh] {
        big.learn(statistics).await;
        let explained = big.explain("SELECT * FROM inbox_status WHERE message_id = 'old-7'").await;
        assert!(reads_by_index(&explained, "inbox_message", "inbox_message_identity"), "{statistics:?}: {explained:#}");
        assert!(reads_by_index(&explained, "inbox_delivery", "inbox_delivery_pkey"), "{statistics:?}: {explained:#}");
    }
}

// 100,000 deliveries wait for one handler and 50,000 for another. A view that counts them all would read every one.
#[tokio::test(flavor = "multi_thread")]
async fn looking_at_the_backlog_reads_no_more_than_its_bound() {
    let big = Big::full("backlog").await;
    for statistics in [Statistics::Stale, Statistics::Fresh] {
        big.learn(statistics).await;
        backlog_is_bounded(&big).await;
    }
}

// The same at five million, for scripts/nightly: filling takes a minute.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "five million rows: scripts/nightly"]
async fn looking_at_a_backlog_of_five_million_reads_no_more_than_its_bound() {
    let big = Big::full("backlog_nightly").await;
    big.execute("SET auto_explain.log_min_duration = -1; SET synchronous_commit = off").await;
    let open = "INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
                SELECT 1000000 + n, h.id, now() - n * interval '1 microsecond' FROM generate_series(1, 5000000) n, inbox_handler h
                WHERE h.key = 'stranger'";
    big.execute(open).await;
    big.learn(Statistics::Fresh).await;
    backlog_is_bounded(&big).await;
}

// What people do to many rows at once: 100,000 deliveries are pending, and 200,000 records are in quarantine.
#[tokio::test(flavor = "multi_thread")]
async fn acting_on_many_rows_reads_no_more_than_their_portion() {
    let big = Big::full("many").await;
    let operator = big.store().await.operate();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let dashboard = Dashboard::new(&big.store().await, Access::on_this_machine()).serve(listener);
    let dashboard = tokio::spawn(dashboard);
    for (statistics, handler, count) in
        [(Statistics::Stale, "audit", "3,001"), (Statistics::Fresh, "stranger", "10,000")]
    {
        big.learn(statistics).await;
        let from = big.log_length();
        let shown = forms::links(&address, "/deliveries").await;
        assert!(shown.iter().any(|link| link.contains("state=pending&handler=mail")), "{shown:?}");
        let discard = forms::form(&address, &format!("verb=discard&state=pending&handler={handler}")).await;
        let discarded = forms::ended(&address, &forms::send(&address, &discard).await).await;
        assert_eq!(discarded, format!("finished: {count} discarded"));
        let rest = QuarantineFilter::default().topic("orders").after_id(150_000);
        assert_eq!(operator.quarantined(&rest, 100).await.unwrap()[0].id, 150_001);

        let is_ours = |plan: &explained::Plan| {
            let pieces =
                ["count(*) AS deliveries", "unnest(message_seqs, handler_ids", "SELECT q.id FROM inbox_quarantine q"];
            pieces.iter().any(|piece| plan.sql.contains(piece))
        };
        let plans: Vec<_> = big.plans(from).into_iter().filter(is_ours).collect();
        assert!(plans.len() >= 3, "{statistics:?}: {} plans", plans.len());
        let offences: Vec<String> = plans.iter().flat_map(explained::Plan::offences).collect();
        assert!(offences.is_empty(), "{statistics:?}: {}", offences[0]);
    }
    dashboard.abort();
}

async fn backlog_is_bounded(big: &Big) {
    let from = big.log_length();
    let operator = big.store().await.operate();
    let handlers = operator.doctor().await.unwrap().handlers;
    let counts: Vec<_> =
        handlers.iter().map(|handler| (handler.handler_key.as_str(), handler.due, handler.later)).collect();
    assert_eq!(counts[1..], [("mail", 1, 10_000), ("stock", 1, 0), ("stranger", 10_000, 0)]);
    let plans = big.plans(from);
    let offences: Vec<String> = plans.iter().flat_map(explained::Plan::offences).collect();
    assert!(offences.is_empty(), "{}", offences[0]);
    let pages: u64 = plans.iter().map(explained::Plan::pages).sum();
    assert!(pages < 60_000, "{pages} pages");
}

// A transaction left open anywhere keeps vacuum from removing dead rows. Claims must not get slower by it.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_does_not_walk_over_what_was_finished_before_while_vacuum_can_remove_nothing() {
    let big = Big::almost_empty("pinned").await;
    // Claims of 300 rows at most, so that what they pass over shows beside what they take.
    let inbox = big.inbox(quick().claim_ahead(Duration::ZERO), 100).await;
    inbox.accept_all(records(6_000)).await.unwrap();
    let pin = connect(&big.cluster.url(&big.name)).await;
    pin.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM inbox_delivery").await.unwrap();
    let from = big.log_length();
    let running = inbox.start().await.unwrap();
    big.until("SELECT count(*) = 0 FROM inbox_delivery WHERE finished_at IS NULL").await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let claims: Vec<_> = big.plans(from).into_iter().filter(|plan| plan.sql.contains(STATEMENTS[4].1)).collect();
    let mut pages: Vec<u64> = claims.iter().filter(|claim| claim.rows() > 100.0).map(|claim| claim.pages()).collect();
    let late = pages.split_off(pages.len() * 3 / 4);
    // Those that look from the beginning, four times a second, do walk over everything; the others begin where the last one ended.
    let cheapest = late.iter().min().copied().unwrap_or(u64::MAX);
    // 300 rows at most: six pages each, and the finished ones of the same instant. The 18,000 dead ones behind are 4,500 pages.
    assert!(cheapest < 3_500, "{late:?} pages at the end, {pages:?} before");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_touches_no_more_pages_for_all_that_lies_beside_it() {
    let mut pages = Vec::new();
    for big in [Big::almost_empty("pages_empty").await, Big::full("pages_full").await] {
        big.execute("UPDATE inbox_delivery SET due_at = now() + interval '1 day' WHERE finished_at IS NULL").await;
        big.execute("VACUUM ANALYZE").await;
        let inbox = big.inbox(Limits::default(), 16).await;
        inbox.accept_all(records(16)).await.unwrap();
        let from = big.log_length();
        assert_eq!(inbox.run_due().await.unwrap(), 48);
        let plans = big.plans(from);
        let claim = plans.iter().find(|plan| plan.sql.contains(STATEMENTS[4].1)).expect("a claim");
        assert!((claim.rows() - 48.0).abs() < 0.1, "{} rows", claim.rows());
        pages.push(claim.pages());
    }
    // Of the large tables the messages are read by an index of three levels; the small ones are a page.
    assert!(pages[1] <= pages[0] + 5 * 48, "{pages:?}");
}

// One tenant has 100,000 due deliveries, and 20,000 others have only deliveries that are not due.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_a_fair_handler_touches_no_more_pages_for_all_that_its_tenants_have() {
    let mut pages = Vec::new();
    for (name, burst, later) in [("fair_few", 100, 20), ("fair_many", 100_000, 20_000)] {
        let big = Big::almost_empty(name).await;
        let fair = Runs::new().handler("fair").concurrency(16).fair_by(FairKey::record_key());
        let inbox = Inbox::builder(big.store().await).subscribe("tenants", fair).build().unwrap();
        let of_small = |n: usize| Record::new("tenants").with_id(format!("small-{n}")).with_key("small");
        inbox.accept_all((0..8).map(of_small)).await.unwrap();
        let fill = format!(
            "SET auto_explain.log_min_duration = -1;
             INSERT INTO inbox_message (message_id, source, topic, payload_hash)
             SELECT 'burst-' || n, 'tenants', 'tenants', '\\x00' FROM generate_series(1, {burst} + {later}) n;
             INSERT INTO inbox_delivery (message_seq, handler_id, fair_hash, due_at)
             SELECT m.seq, h.id, CASE WHEN n <= {burst} THEN 7 ELSE n END, now() + CASE WHEN n <= {burst} THEN -1 ELSE 24 END * interval '1 hour'
             FROM inbox_message m CROSS JOIN LATERAL (SELECT substring(m.message_id FROM 7)::int AS n) b, inbox_handler h
             WHERE m.message_id LIKE 'burst-%' AND h.key = 'fair';"
        );
        big.execute(&fill).await;
        big.execute("VACUUM ANALYZE").await;
        let from = big.log_length();
        let ran = inbox.run_due().await.unwrap();
        let plans = big.plans(from);
        let is_fair =
            |plan: &&explained::Plan| plan.sql.contains("RECURSIVE scan") || plan.sql.contains("ask.fair_hash, ask");
        let fair: Vec<_> = plans.iter().filter(is_fair).collect();
        assert!(fair.len() >= 2 && ran >= 8, "{} statements, {ran} runs", fair.len());
        pages.push(fair.iter().map(|plan| plan.pages()).max());
    }
    // A scan skips at most 256 tenants without due deliveries, each with two probes of five pages. A scan of the burst
    // would touch 100,000.
    assert!(pages[1] <= Some(10 * (16 + 256) + 500), "{pages:?}");
}

// A delivery that is done is settled with the next of its key; for one that is discarded, a trigger looks for the next.
#[tokio::test(flavor = "multi_thread")]
async fn ordered_handlers_touch_no_more_pages_for_all_that_waits_behind_a_key() {
    let statements = ["order_key AS MATERIALIZED", "WITH promoted AS MATERIALIZED", "h.order_hash = OLD.order_hash"];
    let mut pages = Vec::new();
    for (name, held) in [("held_few", 100), ("held_many", 20_000)] {
        let big = Big::almost_empty(name).await;
        let (done, discarded) = (Runs::new(), Runs::new());
        let discarding = discarded.answering("sorted_out", |_| Err(Failure::discard("not ours")));
        let inbox = Inbox::builder(big.store().await)
            .subscribe("sorted", done.handler("sorted").ordered_by(OrderKey::record_key()))
            .subscribe("sorted", discarding.ordered_by(OrderKey::record_key()))
            .build()
            .unwrap();
        inbox.accept(Record::new("sorted").with_id("head").with_key("k")).await.unwrap();
        let fill = format!(
            "SET auto_explain.log_min_duration = -1;
             INSERT INTO inbox_message (message_id, source, topic, payload_hash)
             SELECT 'held-' || n, 'sorted', 'sorted', '\\x00' FROM generate_series(1, {held}) n;
             INSERT INTO inbox_delivery (message_seq, handler_id, order_hash, due_at)
             SELECT m.seq, d.handler_id, d.order_hash, 'infinity' FROM inbox_message m, inbox_delivery d
             WHERE m.message_id LIKE 'held-%' AND d.order_hash IS NOT NULL;"
        );
        big.execute(&fill).await;
        for statistics in [Statistics::Stale, Statistics::Fresh] {
            big.learn(statistics).await;
            let from = big.log_length();
            // The first run makes the next delivery of the key due, and so on.
            for _ in 0..4 {
                assert_eq!(inbox.run_due().await.unwrap(), 2);
            }
            let plans = big.plans(from);
            pages.push(statements.map(|piece| {
                let plans = plans.iter().filter(|plan| plan.sql.contains(piece));
                let pages: Vec<u64> = plans.map(explained::Plan::pages).collect();
                assert!(pages.len() >= 4, "{piece} was executed {} times", pages.len());
                pages.into_iter().max().unwrap_or_default()
            }));
        }
        let ids: Vec<String> = ["head".to_owned()].into_iter().chain((1..8).map(|n| format!("held-{n}"))).collect();
        assert_eq!((done.ids(), discarded.ids()), (ids.clone(), ids));
    }
    let (few, many) = (pages[..2].concat(), pages[2..].concat());
    // An index of 20,000 entries has one level more than one of 100.
    assert!(few.iter().zip(&many).all(|(few, many)| *many <= few + 40), "{few:?} pages with few, {many:?} with many");
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_are_hot_updates() {
    let scene = Scene::new().await;
    let stuck = handler(key("stock"), async |_: Message<Raw>| std::future::pending::<Result<(), Failure>>().await);
    let limits = Limits::default().lease(Duration::from_secs(600));
    let inbox = scene.inbox().limits(limits).subscribe("orders", stuck.concurrency(2_000)).build().unwrap();
    inbox.accept_all(records(2_000)).await.unwrap();

    let running = inbox.start().await.unwrap();
    scene.until("SELECT (count(*) = 2000)::int::bigint FROM inbox_delivery WHERE locked_until IS NOT NULL").await;
    // The server reports a moment later.
    let updated = "FROM pg_stat_user_tables WHERE relname = 'inbox_delivery'";
    inbox.accept(record("more")).await.unwrap();
    scene.until(&format!("SELECT (n_tup_upd >= 2000)::int::bigint {updated}")).await;

    let cold = scene.database.query_one_i64(&format!("SELECT n_tup_upd - n_tup_hot_upd {updated}")).await;
    assert!(cold < 200, "{cold} of 2000 claims touched the indexes");
    drop(running);
}

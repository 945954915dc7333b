//! Measures what must stay constant: the time of a claim with other rows in the tables, and memory with the backlog.

use crate::ours::Order;
use crate::{Scale, fresh_database, ours, tidy_up};
use support::bench::{done_with, memory_mib};
use support::postgres::{Cluster, connect};

/// Milliseconds per claimed delivery, on the server.
#[derive(Debug, Clone, Copy, Default)]
pub struct Growth {
    pub empty_ms: f64,
    pub beside_ms: f64,
    pub ratio: f64,
}

/// Resident memory after draining a small and a large backlog.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    pub small_mib: f64,
    pub large_mib: f64,
}

/// Compares claims without other rows and beside many deliveries that are done, not yet due or of other handlers.
pub async fn claim_growth(cluster: &Cluster, scale: Scale) -> Growth {
    let work = Scale { messages: scale.messages.min(20_000), ..scale };
    let beside = fresh_database(cluster).await;
    fill(&beside, scale.ballast).await;
    compared(cluster, scale, work, &beside, "beside much", Order::None).await
}

/// Compares claims of an ordered handler without other rows, and with many deliveries held behind one key and many
/// other keys, each with a head that is due later.
pub async fn claim_growth_ordered(cluster: &Cluster, scale: Scale) -> Growth {
    let work = Scale { messages: scale.messages.min(20_000), ..scale };
    let beside = fresh_database(cluster).await;
    drop(ours::inbox_in(&beside, Order::ByKey).await.accept_all([]).await.unwrap());
    let (held, keys) = (scale.ballast / 10, scale.ballast);
    let fill = format!(
        "INSERT INTO inbox_delivery (message_seq, handler_id, order_hash, due_at)
         SELECT -n, 1, 1, CASE WHEN n = {held} THEN now() + interval '1 day' ELSE 'infinity' END FROM generate_series(1, {held}) n;
         INSERT INTO inbox_delivery (message_seq, handler_id, order_hash, due_at)
         SELECT -{held} - n, 1, n + 1, now() + interval '1 day' FROM generate_series(1, {keys}) n"
    );
    connect(&beside).await.batch_execute(&fill).await.unwrap();
    tidy_up(&beside).await;
    compared(cluster, scale, work, &beside, "beside held ones", Order::ByKey).await
}

/// Compares claims without other rows, and with many done deliveries whose old row versions vacuum cannot remove,
/// because a session (such as a backup) holds an older snapshot.
pub async fn claim_growth_held_snapshot(cluster: &Cluster, scale: Scale) -> Growth {
    let work = Scale { messages: scale.messages.min(100_000), ..scale };
    let held = fresh_database(cluster).await;
    drop(ours::inbox(&held).await.accept_all([]).await.unwrap());
    let holder = connect(&held).await;
    holder.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM inbox_delivery").await.unwrap();
    let churn = [
        format!(
            "INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
             SELECT -n, 1, now() - interval '1 day' + n * interval '1 ms' FROM generate_series(1, {}) n",
            scale.ballast
        ),
        "UPDATE inbox_delivery SET locked_until = now(), locked_by = 1, attempts = 1".to_owned(),
        "UPDATE inbox_delivery SET status = 2, finished_at = now(), locked_until = NULL, locked_by = NULL".to_owned(),
        // Vacuum cannot remove the old row versions and their index entries while the snapshot is held.
        "VACUUM ANALYZE inbox_delivery".to_owned(),
        "CHECKPOINT".to_owned(),
    ];
    for sql in churn {
        connect(&held).await.batch_execute(&sql).await.unwrap();
    }
    let growth = compared(cluster, scale, work, &held, "under a held snapshot", Order::None).await;
    drop(holder);
    growth
}

/// Claims in an empty database and in `beside`, in short turns; which one begins alternates. Returns the turn with the
/// median ratio.
async fn compared(cluster: &Cluster, scale: Scale, work: Scale, beside: &str, what: &str, order: Order) -> Growth {
    let empty = fresh_database(cluster).await;
    let empty = empty.as_str();
    for url in [empty, beside] {
        // Autovacuum would run during some turns only, so each turn vacuums before it measures.
        let off = "ALTER TABLE inbox_delivery SET (autovacuum_enabled = off); ALTER TABLE inbox_message SET (autovacuum_enabled = off)";
        connect(url).await.batch_execute(off).await.unwrap();
    }
    // These turns are not measured: after a table was filled, the cache is cold.
    for url in [empty, beside] {
        claim_ms(cluster, url, work, order).await;
    }
    let mut growths = Vec::new();
    for turn in 0..2 * scale.repeats + 1 {
        let (empty_ms, beside_ms) = if turn % 2 == 0 {
            let empty_ms = claim_ms(cluster, empty, work, order).await;
            (empty_ms, claim_ms(cluster, beside, work, order).await)
        } else {
            let beside_ms = claim_ms(cluster, beside, work, order).await;
            (claim_ms(cluster, empty, work, order).await, beside_ms)
        };
        println!("  claim: {:.1} µs a row, {what} {:.1} µs", empty_ms * 1e3, beside_ms * 1e3);
        growths.push(Growth { empty_ms, beside_ms, ratio: beside_ms / empty_ms });
    }
    done_with(cluster, empty, "claims").await;
    done_with(cluster, beside, &format!("claims {what}")).await;
    growths.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
    growths[growths.len() / 2]
}

/// Adds other rows of each kind. Handler 1 is measured.
async fn fill(url: &str, ballast: usize) {
    drop(ours::inbox(url).await.accept_all([]).await.unwrap());
    let rows = |from: usize, columns: &str, values: &str| {
        let to = from + ballast - 1;
        format!(
            "INSERT INTO inbox_delivery (message_seq, handler_id, due_at{columns}) SELECT -n, {values} FROM generate_series({from}, {to}) n;"
        )
    };
    let done = rows(1, ", status, finished_at", "1, now() - interval '1 day', 2 /* done */, now()");
    let later = rows(ballast + 1, "", "1, now() + interval '1 day' + n * interval '1 ms'");
    let other = rows(2 * ballast + 1, "", "2, now() - interval '1 day'");
    connect(url).await.batch_execute(&format!("{done}{later}{other}")).await.unwrap();
    tidy_up(url).await;
}

/// The server's time per claimed delivery, from `pg_stat_statements`, which excludes the time of the engine.
async fn claim_ms(cluster: &Cluster, url: &str, work: Scale, order: Order) -> f64 {
    let inbox = ours::inbox_in(url, order).await;
    let client = connect(url).await;
    client.batch_execute("DELETE FROM inbox_message").await.unwrap();
    ours::accept_all(&inbox, work).await;
    client.batch_execute("VACUUM ANALYZE inbox_delivery").await.unwrap();
    client.batch_execute("SELECT pg_stat_statements_reset()").await.unwrap();
    ours::drain_in_background(cluster, &inbox, url, work.messages).await;
    let statement = match order {
        Order::None => "%WITH claimed AS%",
        Order::ByKey => "%order_key AS MATERIALIZED%",
    };
    let row = client
        .query_one(
            "SELECT sum(total_exec_time)::float8, sum(rows)::float8 FROM pg_stat_statements WHERE query LIKE $1",
            &[&statement],
        )
        .await
        .unwrap();
    let (total, rows): (f64, f64) = (row.get(0), row.get(1));
    total / rows
}

pub async fn memory(cluster: &Cluster, scale: Scale) -> Memory {
    let mut resident = [0.0; 2];
    for (place, messages) in [scale.messages / 10, scale.messages * 3].into_iter().enumerate() {
        let url = fresh_database(cluster).await;
        let inbox = ours::inbox(&url).await;
        ours::accept_all(&inbox, Scale { messages, ..scale }).await;
        ours::drain_in_background(cluster, &inbox, &url, messages).await;
        resident[place] = memory_mib("VmRSS");
        done_with(cluster, &url, "memory").await;
    }
    let [small_mib, large_mib] = resident;
    Memory { small_mib, large_mib }
}

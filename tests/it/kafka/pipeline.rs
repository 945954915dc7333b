//! The process is killed while several batches of one partition are in progress: the stored records stay a prefix of
//! the partition, so none is lost, and none is stored twice even without an identity.
//!
//! The test holds the lock of the ledger's row, so the batches wait for it in the database, one after another, when the
//! process is killed.

use tokio_postgres::Client;

use super::reader::Reader;
use super::stage::Stage;
use support::child::Child;
use support::postgres::connect;

const RECORDS: usize = 200;
/// The default number of batches of one partition that may be in progress.
const UNDER_WAY: usize = 3;
const ROUNDS: usize = 2;

/// The server processes of accept statements that wait for the ledger.
const WAITING: &str =
    "SELECT pid::bigint FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
                       AND query LIKE '%held AS MATERIALIZED%'";

/// What is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Killed {
    /// The waiting statements continue when the ledger is free; their client is gone.
    TheReader,
    /// The first waiting statement is cancelled too, as if it had never arrived. The later ones must write nothing.
    ItsFirstStatement,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_with_batches_in_progress_loses_and_doubles_nothing() {
    killed(Killed::TheReader).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_first_batch_is_lost_no_later_batch_is_stored() {
    killed(Killed::ItsFirstStatement).await;
}

async fn killed(what: Killed) {
    let stage = Stage::new(1).await;
    let observer = stage.observed();
    let holder = connect(&stage.scene.database.url()).await;
    let reader = Reader::on(&stage).named("reader").limits("accept_batch_rows=10").undeduplicated();
    for round in 0..ROUNDS {
        let child = reader.spawn();
        begun(&child).await;
        caught_up(&stage, round * RECORDS).await;
        hold_ledger(&holder).await;
        // The first batch waits before there is a second one.
        stage.produce(0, 1).await;
        waiting(&stage, 1).await;
        let first = stage.scene.database.query_one_i64(WAITING).await;
        stage.produce(0, RECORDS - 1).await;
        waiting(&stage, UNDER_WAY).await;
        child.kill9().await;
        if what == Killed::ItsFirstStatement {
            let gone = format!("SELECT pg_terminate_backend({first})::int::bigint");
            assert_eq!(stage.scene.database.query_one_i64(&gone).await, 1);
            waiting(&stage, UNDER_WAY - 1).await;
        }
        holder.batch_execute("COMMIT").await.unwrap();
        nothing_runs(&stage).await;
        if what == Killed::ItsFirstStatement {
            assert_eq!(
                stage.positions().await.len(),
                round * RECORDS,
                "a batch was stored before the one that it follows"
            );
        }
    }
    let survivor = reader.spawn();
    begun(&survivor).await;
    let produced = [i64::try_from(ROUNDS * RECORDS).unwrap()];
    stage.caught_up(&produced).await;
    survivor.term();
    assert!(survivor.wait().await.success());
    observer.finish().await;
    stage.assert_whole(&produced).await;
    assert_eq!(stage.positions().await.len(), ROUNDS * RECORDS);
    let in_order = "SELECT (bool_and(is_later))::int::bigint FROM
                    (SELECT seq > lag(seq, 1, 0) OVER (ORDER BY kafka_offset) AS is_later FROM inbox_message) m";
    assert_eq!(stage.scene.database.query_one_i64(in_order).await, 1);
}

async fn hold_ledger(holder: &Client) {
    holder.batch_execute("BEGIN; SELECT FROM inbox_ledger FOR UPDATE").await.unwrap();
}

async fn waiting(stage: &Stage, count: usize) {
    stage.scene.until(&format!("SELECT (count(*) = {count})::int::bigint FROM ({WAITING}) waiting")).await;
}

/// Statements of a killed process continue; when they have ended, nothing writes.
async fn nothing_runs(stage: &Stage) {
    let running = "pg_stat_activity WHERE datname = current_database() AND state = 'active' AND pid <> pg_backend_pid()
                   AND query LIKE '%held AS MATERIALIZED%'";
    stage.scene.until(&format!("SELECT (count(*) = 0)::int::bigint FROM {running}")).await;
}

async fn caught_up(stage: &Stage, count: usize) {
    stage.scene.until(&format!("SELECT (max(next_offset) = {count})::int::bigint FROM inbox_ledger")).await;
}

/// Waits until the reader reads.
async fn begun(reader: &Child) {
    reader.await_line(|line| line.starts_with("partition begun")).await;
}

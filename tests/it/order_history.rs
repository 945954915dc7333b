//! The history of ordered handlers while processes are killed and frozen: each effect of a key exists once, in accept
//! order.
//!
//! Effects are rows that a transactional handler commits together with its outcome. If a frozen process continues with
//! a claim that another process has by then, its work is rolled back, so the rows are the history that counts.
//! PostgreSQL only: on SQLite one transactional handler runs at a time.
//!
//! Of a plain handler, the runs themselves are the history: each one records its start and its end. Processes are only
//! killed, because nothing stops a frozen process from ending a run that another process has begun again.

use std::time::Duration;

use futures_util::future::select_all;
use wharf::order::OrderKey;
use wharf::{Inbox, InboxBuilder, Postgres, Record};

use crate::scene::{Runs, Scene, State};
use crate::worker::{ENDED, Worker, order};
use support::child::Child;

const KEYS: usize = 15;
const MESSAGES: usize = 450;
const ROUNDS: usize = 5;
const MESSAGES_OF_A_ROUND: usize = 60;

#[tokio::test(flavor = "multi_thread")]
async fn effects_of_a_key_stay_in_order_over_kills_freezes_and_retries() {
    let scene = Scene::new().await;
    // In the order in which they were written.
    let table = "CREATE TABLE effect (message_id text, written_as bigint GENERATED ALWAYS AS IDENTITY)";
    scene.database.execute(table).await;
    let worker = Worker {
        is_transactional: true,
        is_ordered: true,
        concurrency: 4,
        // The kills have another cause, so they must not poison any delivery.
        crash_limit: 1_000,
        ..Worker::on(&scene).await
    };
    let mut workers = [worker.spawn(), worker.spawn(), worker.spawn()];
    let accepting = tokio::spawn(accept_all(scene.inbox()));

    for round in 0..6 {
        written(&scene, 40 * (round + 1)).await;
        let place = round % workers.len();
        if round % 2 == 0 {
            workers[place].kill9().await;
            workers[place] = worker.spawn();
        } else {
            freeze_past_its_lease(&scene, &workers[place]).await;
        }
    }
    accepting.await.unwrap();
    scene.settled().await;

    let written = scene.database.query_texts("SELECT message_id FROM effect ORDER BY written_as").await;
    assert_eq!(written.len(), MESSAGES);
    for key in 0..KEYS {
        let of_key: Vec<&String> = written.iter().filter(|id| number(id) % KEYS == key).collect();
        let accepted: Vec<String> = (0..MESSAGES).filter(|n| n % KEYS == key).map(id).collect();
        assert_eq!(of_key, accepted.iter().collect::<Vec<_>>(), "key {key}");
    }
    assert_eq!(scene.count("inbox_delivery WHERE status <> 2").await, 0);
}

fn accepting(inbox: InboxBuilder<Postgres>) -> Inbox<Postgres> {
    inbox.subscribe("orders", Runs::new().handler("stock").ordered_by(OrderKey::record_key())).build().unwrap()
}

fn of_its_key(n: usize, payload: &str) -> Record {
    order(&id(n), payload).with_key(format!("k{}", n % KEYS))
}

async fn accept_all(inbox: InboxBuilder<Postgres>) {
    let inbox = accepting(inbox);
    let records: Vec<_> = (0..MESSAGES).map(|n| of_its_key(n, if n % 9 == 0 { "fail once" } else { "work" })).collect();
    for batch in records.chunks(25) {
        inbox.accept_all(batch.to_vec()).await.unwrap();
    }
}

/// Freezes a worker until all its claims have expired and the others have continued for a while, then continues it.
async fn freeze_past_its_lease(scene: &Scene, child: &Child) {
    child.stop();
    // It may have been frozen between its settlement and its COMMIT: then it keeps the row lock, and its key waits
    // until it continues.
    let claims = format!(
        "SELECT (count(*) = 0)::int::bigint FROM inbox_delivery d JOIN inbox_processor p ON p.id = d.locked_by
         WHERE p.name LIKE '%/{}' AND d.locked_until > now()",
        child.id()
    );
    scene.until(&claims).await;
    // Near the end, what is left may be behind keys of the frozen worker, or done already.
    let so_far = usize::try_from(scene.count("effect").await).unwrap();
    if so_far + 120 < MESSAGES {
        written(scene, so_far + 20).await;
    }
    child.cont();
}

async fn written(scene: &Scene, count: usize) {
    scene.until(&format!("SELECT (count(*) >= {count})::int::bigint FROM effect")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_a_key_never_overlap_and_follow_settled_ones_over_kills_and_retries() {
    let scene = Scene::new().await;
    // No process loses a claim while it lives, however slow the machine is.
    let lease = Duration::from_secs(600);
    let base = Worker { is_ordered: true, concurrency: 4, records_ends: true, lease, ..Worker::on(&scene).await };
    let base = Worker { crash_limit: 1_000, ..base };
    record_what_is_open_before_each_run(&scene).await;
    // Each process has another name for its sessions.
    let spawn = |number: usize| {
        let separator = if base.url.contains('?') { '&' } else { '?' };
        Worker { url: format!("{}{separator}application_name=worker{number}", base.url), ..base.clone() }.spawn()
    };
    let mut workers: Vec<(usize, Child)> = (0..3).map(|number| (number, spawn(number))).collect();
    let inbox = accepting(scene.inbox());

    for round in 0..ROUNDS {
        let first = round * MESSAGES_OF_A_ROUND;
        // One run of the round never ends, of another key each time.
        let payload = |n: usize| match n - first {
            place if place == 20 + round => "hang once",
            place if place % 9 == 0 => "fail once",
            _ => "work",
        };
        let records = (first..first + MESSAGES_OF_A_ROUND).map(|n| of_its_key(n, payload(n)));
        inbox.accept_all(records).await.unwrap();
        let hanging = workers.iter().map(|(_, worker)| Box::pin(worker.await_said("hanging")));
        let ((), place, _) = select_all(hanging).await;
        let (number, worker) = std::mem::replace(&mut workers[place], (3 + round, spawn(3 + round)));
        kill_and_let_its_leases_end(&scene, number, &worker).await;
    }
    scene.settled().await;

    let recorded = "SELECT concat_ws(' ', message_id, handler_key, attempt, open_before) FROM run ORDER BY recorded_as";
    let recorded = scene.database.query_texts(recorded).await;
    let moments: Vec<Moment> = recorded.iter().map(|row| Moment::of(row)).collect();
    let killed: usize = (0..KEYS).map(|key| assert_one_at_a_time(&moments, key)).sum();
    assert!((ROUNDS..=4 * ROUNDS).contains(&killed), "{killed} runs were killed");
    assert_eq!(scene.count_in(State::Done).await, i64::try_from(ROUNDS * MESSAGES_OF_A_ROUND).unwrap());
}

/// The start or the end of a run.
#[derive(Debug)]
struct Moment {
    message: usize,
    is_end: bool,
    attempt: u32,
    /// Deliveries of the key that came before it and were not settled.
    open_before: u32,
}

impl Moment {
    fn of(row: &str) -> Moment {
        let [id, handler_key, attempt, open_before] = row.split(' ').collect::<Vec<_>>()[..] else { panic!("{row}") };
        let (attempt, open_before) = (attempt.parse().unwrap(), open_before.parse().unwrap());
        Moment { message: number(id), is_end: handler_key == ENDED, attempt, open_before }
    }
}

/// Fails if two runs of the key overlap, or if one starts before all earlier deliveries of its key are settled. Returns
/// how many runs did not end: their process was killed.
fn assert_one_at_a_time(moments: &[Moment], key: usize) -> usize {
    let (mut running, mut begun, mut killed) = (None::<&Moment>, Vec::new(), 0);
    for moment in moments.iter().filter(|moment| moment.message % KEYS == key) {
        if moment.is_end {
            let own = running.take().map(|run| (run.message, run.attempt));
            assert_eq!(own, Some((moment.message, moment.attempt)), "{moment:?} ended beside another run");
            continue;
        }
        if let Some(before) = running.replace(moment) {
            let is_next = before.message == moment.message && before.attempt < moment.attempt;
            assert!(is_next, "{moment:?} started while {before:?} ran");
            killed += 1;
        }
        assert_eq!(moment.open_before, 0, "{moment:?} overtook others");
        begun.push(moment.message);
    }
    assert!(running.is_none(), "{running:?} did not end");
    begun.dedup();
    let accepted: Vec<usize> = (0..ROUNDS * MESSAGES_OF_A_ROUND).filter(|n| n % KEYS == key).collect();
    assert_eq!(begun, accepted, "key {key}");
    killed
}

/// Gives each record of a run its place in the history, and the number of earlier deliveries of its key that are not
/// settled at that moment.
async fn record_what_is_open_before_each_run(scene: &Scene) {
    scene
        .database
        .execute(
            "ALTER TABLE run ADD COLUMN recorded_as bigint GENERATED ALWAYS AS IDENTITY, ADD COLUMN open_before bigint;
             CREATE FUNCTION look_before() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 NEW.open_before := (
                     SELECT count(*) FROM inbox_message own
                     JOIN inbox_message m ON m.record_key = own.record_key AND m.seq < own.seq
                     JOIN inbox_delivery d ON d.message_seq = m.seq AND d.finished_at IS NULL
                     WHERE own.message_id = NEW.message_id);
                 RETURN NEW;
             END $$;
             CREATE TRIGGER look_before BEFORE INSERT ON run FOR EACH ROW EXECUTE FUNCTION look_before()",
        )
        .await;
}

/// Kills a worker, and moves the end of its leases to now once the server has ended everything that it was asked for.
async fn kill_and_let_its_leases_end(scene: &Scene, number: usize, worker: &Child) {
    worker.kill9().await;
    let sessions = format!("pg_stat_activity WHERE application_name = 'worker{number}'");
    scene.until(&format!("SELECT (count(*) = 0)::int::bigint FROM {sessions}")).await;
    let end = format!(
        "WITH killed AS (UPDATE inbox_processor SET alive_until = now() WHERE name LIKE '%/{}' RETURNING id)
         UPDATE inbox_delivery d SET locked_until = now() FROM killed k WHERE d.locked_by = k.id",
        worker.id()
    );
    scene.database.execute(&end).await;
}

fn id(number: usize) -> String {
    format!("m{number:04}")
}

fn number(id: &str) -> usize {
    id[1..].parse().unwrap()
}

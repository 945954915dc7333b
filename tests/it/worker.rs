//! The child process that crash and lease tests kill, freeze and continue: a running inbox on the test's database.
//!
//! Its handlers do what the message's payload says ([`obey`]). Each run is recorded in the table `run` before it
//! begins, on a separate connection, so that the test can count runs even if the process crashes.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use wharf::batch::{Answers, BatchHandler, TxBatchHandler, batch_handler, tx_batch_handler};
use wharf::flow::{Breaker, RateLimit};
use wharf::order::OrderKey;
use wharf::{Failure, Inbox, Limits, Message, Raw, Record, Registration, TxHandler, handler, tx_handler};

use super::effect;
use super::scene::{Data, Database, Db, RunLog, Scene, WORKER, key, quick};
use support::child::{Child, Role, parameter, say};
use support::events::Events;

pub const ROLE: (&str, Role) = (WORKER, work);

/// The handlers of a worker, each with a delivery of every message.
pub const HANDLERS: [&str; 2] = ["stock", "mail"];

const URL: &str = "WORKER_URL";
const KIND: &str = "WORKER_KIND";
const LEASE_MS: &str = "WORKER_LEASE_MS";
const CONCURRENCY: &str = "WORKER_CONCURRENCY";
const SHARE: &str = "WORKER_SHARE";
/// The batch size, 0 if the handlers take one message at a time, and how long a message waits for others.
const BATCH: &str = "WORKER_BATCH";
const BATCH_WAIT_MS: &str = "WORKER_BATCH_WAIT_MS";
const CRASH_LIMIT: &str = "WORKER_CRASH_LIMIT";
/// Set when the handlers are ordered by the record's key.
const IS_ORDERED: &str = "WORKER_IS_ORDERED";
/// Set when the handlers have breakers, which open after five failures and probe once an hour.
const IS_BREAKING: &str = "WORKER_IS_BREAKING";
/// How many deliveries of a handler start in the first hour, over all workers; 0: any number.
const RATE_BURST: &str = "WORKER_RATE_BURST";
/// Set when plain handlers also record the end of each run.
const RECORDS_ENDS: &str = "WORKER_RECORDS_ENDS";
/// A file that the payload `gate` waits for, and without which the dependency of the payload `away` is unavailable.
const GATE: &str = "WORKER_GATE";

/// Instead of the handler key in the record of a run's end.
pub const ENDED: &str = "ended";

/// The settings of a worker.
#[derive(Clone)]
pub struct Worker {
    pub url: String,
    pub is_transactional: bool,
    pub lease: Duration,
    pub concurrency: usize,
    /// Deliveries per transaction, if it is transactional.
    pub share: usize,
    /// Maximum number of messages per call; 0 if its handlers take one message at a time.
    pub batch: usize,
    /// How long a message waits for others of its batch.
    pub batch_wait: Duration,
    pub crash_limit: u32,
    pub gate: String,
    /// Its handlers are ordered by the record's key.
    pub is_ordered: bool,
    /// Its handlers have breakers.
    pub is_breaking: bool,
    /// How many deliveries of a handler start in the first hour, over all workers; 0: any number.
    pub rate_burst: u32,
    /// Its plain handlers record the end of each run too, as [`ENDED`]: after the work, before the answer.
    pub records_ends: bool,
    /// More environment variables.
    pub variables: Vec<(&'static str, String)>,
}

impl Worker {
    /// A worker on the scene's database, with short leases. Creates the tables that workers write to.
    pub async fn on(scene: &Scene) -> Worker {
        effect::prepare(scene).await;
        scene.database.prepare_run_log().await;
        Worker {
            url: scene.database.url(),
            is_transactional: false,
            lease: Duration::from_secs(1),
            concurrency: 16,
            share: 1,
            batch: 0,
            batch_wait: Duration::from_millis(20),
            crash_limit: Limits::default().crash_limit,
            gate: String::new(),
            is_ordered: false,
            is_breaking: false,
            rate_burst: 0,
            records_ends: false,
            variables: Vec::new(),
        }
    }

    pub fn spawn(&self) -> Child {
        let lease = self.lease.as_millis().to_string();
        let (concurrency, crash_limit) = (self.concurrency.to_string(), self.crash_limit.to_string());
        let (share, batch) = (self.share.to_string(), self.batch.to_string());
        let batch_wait = self.batch_wait.as_millis().to_string();
        let rate_burst = self.rate_burst.to_string();
        let mut variables = vec![
            (URL, self.url.as_str()),
            (KIND, if self.is_transactional { "transactional" } else { "plain" }),
            (LEASE_MS, &lease),
            (CONCURRENCY, &concurrency),
            (SHARE, &share),
            (BATCH, &batch),
            (BATCH_WAIT_MS, &batch_wait),
            (CRASH_LIMIT, &crash_limit),
            (GATE, &self.gate),
            (IS_ORDERED, if self.is_ordered { "yes" } else { "no" }),
            (RATE_BURST, &rate_burst),
            (IS_BREAKING, if self.is_breaking { "yes" } else { "no" }),
            (RECORDS_ENDS, if self.records_ends { "yes" } else { "no" }),
        ];
        variables.extend(self.variables.iter().map(|(name, value)| (*name, value.as_str())));
        Child::spawn(ROLE.0, &variables)
    }

    /// Accepts a message with this id, and kills a worker while its handler `stock` runs it.
    pub async fn killed_while_it_runs(&self, scene: &Scene, message_id: &str) {
        accept(scene, &["stock"], vec![order(message_id, "hang once")]).await;
        let child = self.spawn();
        child.await_said("hanging").await;
        child.kill9().await;
    }

    /// Restarts a worker each time it crashes, until every delivery has an outcome. Returns the number of crashes.
    pub async fn supervise(&self, scene: &Scene) -> usize {
        let mut deaths = 0;
        loop {
            let child = self.spawn();
            tokio::select! {
                _ = child.wait() => deaths += 1,
                () = scene.settled() => return deaths,
            }
        }
    }
}

/// A message that makes its handlers do this.
pub fn order(id: &str, payload: &str) -> Record {
    Record::new("orders").with_id(id.to_owned()).with_payload(payload.to_owned())
}

/// Accepts messages for `handlers` without running them, so that they exist when a worker starts.
pub async fn accept(scene: &Scene, handlers: &[&'static str], records: Vec<Record>) {
    let inbox = handlers.iter().fold(scene.inbox(), |inbox, name| {
        inbox.subscribe("orders", handler(key(name), async |_: Message<Raw>| Ok::<(), Failure>(())))
    });
    inbox.build().unwrap().accept_all(records).await.unwrap();
}

/// The child: works until it is killed, or ended by SIGTERM.
fn work() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let events = Events::capture();
        let number = |name| parameter(name).parse::<u32>().unwrap();
        let limits = quick().lease(Duration::from_millis(u64::from(number(LEASE_MS)))).crash_limit(number(CRASH_LIMIT));
        let store = Data::open_at(&parameter(URL)).await;
        let log = Arc::new(Data::run_log(&parameter(URL)).await);
        let registration = |name: &'static str| {
            let concurrency = usize::try_from(number(CONCURRENCY)).unwrap();
            let registration = worker_handler(name, Arc::clone(&log)).concurrency(concurrency);
            let registration = match number(RATE_BURST) {
                0 => registration,
                burst => registration.rate(RateLimit::per_hour(1).burst(burst)),
            };
            let registration = match parameter(IS_BREAKING).as_str() {
                "yes" => registration.breaker(Breaker::new().failures(5).probe_every(Duration::from_secs(3_600))),
                _ => registration,
            };
            match parameter(IS_ORDERED).as_str() {
                "yes" => registration.ordered_by(OrderKey::record_key()),
                _ => registration,
            }
        };
        let inbox = HANDLERS
            .into_iter()
            .fold(Inbox::builder(store).limits(limits), |inbox, name| inbox.subscribe("orders", registration(name)));
        let running = inbox.build().unwrap().start().await.unwrap();
        say("at work");
        let mut asked_to_end = signal(SignalKind::terminate()).unwrap();
        tokio::select! {
            _ = asked_to_end.recv() => {}
            _ = report(&events, "claim lost") => {}
        }
        running.shutdown(Duration::ZERO).await.unwrap();
        say("ended");
    });
}

/// Reports the event when it has happened, and then waits forever.
async fn report(events: &Events, message: &str) -> Infallible {
    events.wait_for_ever(|event| event.message == message).await;
    say(message);
    std::future::pending().await
}

fn worker_handler(name: &'static str, log: Arc<Log>) -> Registration<Db> {
    let batch = parameter(BATCH).parse().unwrap();
    if batch > 0 {
        let work = BatchWork { name, log };
        let registration = match parameter(KIND).as_str() {
            "transactional" => tx_batch_handler(key(name), work),
            _ => batch_handler(key(name), work),
        };
        return registration.batch(batch, Duration::from_millis(parameter(BATCH_WAIT_MS).parse().unwrap()));
    }
    if parameter(KIND) == "transactional" {
        let share = parameter(SHARE).parse().unwrap();
        return tx_handler(key(name), WriteAndObey { name, log }).share_transaction(share);
    }
    handler(key(name), move |message: Message<Raw>| {
        let log = Arc::clone(&log);
        async move {
            note(&log, name, &message).await;
            let answer = obey(&message).await;
            if parameter(RECORDS_ENDS) == "yes" {
                note(&log, ENDED, &message).await;
            }
            answer
        }
    })
}

/// Writes an effect within the transaction, then obeys.
struct WriteAndObey {
    name: &'static str,
    log: Arc<Log>,
}

impl TxHandler<Raw, effect::Connection> for WriteAndObey {
    async fn handle(&self, message: Message<Raw>, conn: &mut effect::Connection) -> Result<(), Failure> {
        note(&self.log, self.name, &message).await;
        effect::write(conn, message.id()).await?;
        obey(&message).await
    }
}

/// Executes the messages of a call one after another, and returns a result for all of them.
struct BatchWork {
    name: &'static str,
    log: Arc<Log>,
}

impl BatchWork {
    async fn obey_all(&self, messages: &[Message<Raw>]) -> Answers {
        let is_part = messages.len() < parameter(BATCH).parse().unwrap();
        for message in messages {
            // The first call that is a part of a failed batch never ends, so that it can be killed.
            if is_part && *message.payload == *b"hang in a part" && message.attempt() == 1 {
                hang().await;
            }
            if let Err(failure) = obey(message).await {
                return Answers::all(Err(failure));
            }
        }
        Answers::all(Ok(()))
    }
}

impl BatchHandler<Raw> for BatchWork {
    async fn handle(&self, messages: Vec<Message<Raw>>) -> Answers {
        for message in &messages {
            note(&self.log, self.name, message).await;
        }
        self.obey_all(&messages).await
    }
}

impl TxBatchHandler<Raw, effect::Connection> for BatchWork {
    async fn handle(&self, messages: Vec<Message<Raw>>, conn: &mut effect::Connection) -> Answers {
        for message in &messages {
            note(&self.log, self.name, message).await;
            if let Err(error) = effect::write(conn, message.id()).await {
                return Answers::all(Err(error.into()));
            }
        }
        self.obey_all(&messages).await
    }
}

type Log = <Data as Database>::RunLog;

async fn note(log: &Log, name: &str, message: &Message<Raw>) {
    log.note(&format!("('{}', '{name}', {})", message.id(), message.attempt())).await;
}

async fn obey(message: &Message<Raw>) -> Result<(), Failure> {
    match std::str::from_utf8(&message.payload).unwrap() {
        "work" => tokio::time::sleep(Duration::from_millis(5)).await,
        "hopeless" => return Err(Failure::poison("hopeless")),
        "fail once" if message.attempt() == 1 => return Err(Failure::retry_after(Duration::ZERO, "not yet")),
        "away" if !Path::new(&parameter(GATE)).exists() => return Err(Failure::unavailable("nobody answers")),
        "abort" => std::process::abort(),
        "exit" => std::process::exit(1),
        "overflow" => drop(endless(0)),
        // The first run never ends, so that it can be killed.
        "hang once" if message.attempt() == 1 => hang().await,
        // Blocks, so that only the gate ends it.
        "gate" if message.attempt() == 1 => {
            say("at the gate");
            tokio::task::block_in_place(|| {
                while !Path::new(&parameter(GATE)).exists() {
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
        }
        _ => {}
    }
    Ok(())
}

async fn hang() {
    say("hanging");
    std::future::pending::<()>().await;
}

/// Overflows the stack.
#[allow(unconditional_recursion, reason = "it overflows the stack on purpose")]
fn endless(depth: u64) -> u64 {
    std::hint::black_box(endless(std::hint::black_box(depth + 1)) + depth)
}

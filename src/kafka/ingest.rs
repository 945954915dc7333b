//! The ingest: a thread that polls Kafka, hands batches to the store and commits what is stored.
//!
//! It never waits for the database: batches are written by tasks that tell it when they are done. With the database away or the desk
//! full, partitions are paused and polling goes on, so the group loses no member. It ends by itself only when librdkafka says that the
//! consumer cannot go on at all.

mod batches;
mod set_out;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::message::{BorrowedMessage, Message};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout_at;

use super::condition::Condition;
use super::desk::{Desk, Expected, Pauses};
use super::position::At;
use super::rebalance::{Context, Notice, offsets, partitions};
use super::{Kafka, backlog, native, record, retention, settings, watch};
use crate::accept::Intake;
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::{Error, HealthReason, Kind, Result, panic_text};
use set_out::positions;

/// Offsets are committed this often. Rarely enough to cost nothing; what is not committed is in the ledger all the same.
const COMMIT_EVERY: Duration = Duration::from_secs(1);
/// The longest wait for a record. Something that was told is noticed this late at most.
const POLL_MAX: Duration = Duration::from_millis(50);
const POLL_MIN: Duration = Duration::from_millis(1);
/// Batches that are read before it is looked whether one can be written.
const READ_BATCHES: usize = 2;
/// How long batches under way may take when the ingest ends.
const LAST_BATCHES: Duration = Duration::from_secs(3);
/// How often the backlog is looked at, where it has limits.
const BACKLOG_EVERY: Duration = Duration::from_secs(1);

/// A running ingest. Dropping it stops it.
pub(crate) struct Ingest {
    is_stopping: Arc<AtomicBool>,
    /// What the thread ended of, if anything; `None` once it was heard.
    ended: Option<oneshot::Receiver<Option<Error>>>,
    failure: Option<Error>,
    condition: Condition,
}

impl Ingest {
    /// Checks the settings and makes the consumer. Kafka need not be there.
    pub(crate) fn prepare<B: Backend>(
        intake: &Arc<Intake<B>>,
        kafka: &Kafka,
        window: Option<Duration>,
    ) -> Result<ReadyIngest<B>> {
        let config = settings::config(kafka)?;
        let (tell, told) = channel();
        let rules = &intake.rules;
        let in_order = rules.topics().filter(|topic| rules.is_in_order(topic)).map(Arc::from).collect();
        let desk = Desk::new(intake.limits.accept_batches, in_order);
        let context = Context::new(kafka.group.as_str().into(), told, desk);
        let consumer: BaseConsumer<Context> = config.create_with_context(context).map_err(settings::refused)?;
        Ok(ReadyIngest(Work {
            intake: Arc::clone(intake),
            window,
            consumer: Arc::new(consumer),
            config,
            tasks: JoinSet::new(),
            tell,
            is_stopping: Arc::new(AtomicBool::new(false)),
            is_open: true,
            commit_at: Instant::now() + COMMIT_EVERY,
            poll_wait: POLL_MIN,
        }))
    }

    /// Stops reading, lets batches end, commits, leaves the group; not beyond the deadline.
    pub(crate) async fn end(mut self, deadline: Instant) {
        self.is_stopping.store(true, Ordering::Relaxed);
        if let Some(ended) = &mut self.ended {
            let _ = timeout_at(deadline.into(), ended).await;
        }
    }

    /// Says what is not as it should be.
    pub(crate) fn health<B: Backend>(
        &self,
        intake: &Arc<Intake<B>>,
    ) -> impl Fn() -> Vec<HealthReason> + Send + Sync + use<B> {
        let (condition, intake) = (self.condition.clone(), Arc::downgrade(intake));
        move || condition.reasons(intake.upgrade().and_then(|intake| intake.stopped_why()))
    }

    /// Resolves with the error that ended the ingest. Stays pending while it is healthy.
    pub(crate) async fn failure(&mut self) -> Error {
        if let Some(ended) = &mut self.ended {
            self.failure = ended.await.ok().flatten();
            self.ended = None;
        }
        match &self.failure {
            Some(error) => error.repeat(),
            None => std::future::pending().await,
        }
    }
}

/// An ingest whose thread is not started yet.
pub(crate) struct ReadyIngest<B: Backend>(Work<B>);

impl<B: Backend> ReadyIngest<B> {
    pub(crate) fn start(self) -> Result<Ingest> {
        let (is_stopping, intake) = (Arc::clone(&self.0.is_stopping), Arc::clone(&self.0.intake));
        let group = self.0.group().to_owned();
        let (end, ended) = oneshot::channel();
        let condition = Condition::of(self.0.consumer.context());
        let failed = condition.failed();
        let work = move || {
            let run = catch_unwind(AssertUnwindSafe(|| self.0.run()));
            let panicked = |panic| Error::bug(format!("the ingest's thread panicked: {}", panic_text(panic)));
            let failure = run.unwrap_or_else(|panic| Some(panicked(panic)));
            if let Some(error) = &failure {
                events::kafka::ingest_failed(&group, error);
                // It is set once.
                let _ = failed.set(error.to_string());
                intake.hand_over().inspect(|hand_over| hand_over.note_intake(false));
            }
            drop(end.send(failure));
        };
        // Joined by `ended`, in bounded time: closing a consumer may wait for brokers that are gone.
        thread::Builder::new()
            .name("wharf-kafka".to_owned())
            .spawn(work)
            .map_err(|error| Error::configuration("cannot start the ingest's thread").with_source(error))?;
        Ok(Ingest { is_stopping, ended: Some(ended), failure: None, condition })
    }
}

impl Drop for Ingest {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }
}

/// What the thread works with.
struct Work<B: Backend> {
    intake: Arc<Intake<B>>,
    /// How long the inbox knows an identity at the least; none when it forgets nothing.
    window: Option<Duration>,
    consumer: Arc<BaseConsumer<Context>>,
    config: ClientConfig,
    /// Batches and questions under way, on the store's thread. Aborted when the ingest has ended.
    tasks: JoinSet<()>,
    tell: Sender<Notice>,
    is_stopping: Arc<AtomicBool>,
    /// Whether records are wanted: the desk has room and the backlog is within its limits.
    is_open: bool,
    commit_at: Instant,
    /// Short while something happens, longer and longer while nothing does.
    poll_wait: Duration,
}

impl<B: Backend> Work<B> {
    /// Returns what it ended of, when nobody stopped it.
    fn run(mut self) -> Option<Error> {
        let topics: Vec<&str> = self.intake.rules.topics().collect();
        if let Err(error) = self.consumer.subscribe(&topics) {
            return Some(Error::configuration("cannot subscribe to the topics").with_source(error));
        }
        self.watch_backlog();
        self.look_at_retention();
        let watching = watch::run(Arc::clone(&self.intake), &self.consumer);
        self.tasks.spawn_on(watching, self.intake.store.backend.reactor());
        self.tell_intake();
        while !self.is_stopping.load(Ordering::Relaxed) {
            let is_told = self.consumer.context().hear(Duration::ZERO);
            self.set_out();
            self.start_batches();
            self.pause_and_resume();
            self.commit_when_due();
            if self.consumer.context().desk().waits_for_room(&self.intake.limits, Instant::now()) {
                // A batch that has ended has made room by taking the next one.
                self.consumer.context().hear(POLL_MAX);
                continue;
            }
            match self.read() {
                Ok(0) if !is_told => self.poll_wait = (self.poll_wait * 2).min(POLL_MAX),
                Ok(_) => self.poll_wait = POLL_MIN,
                Err(error) => return Some(error),
            }
            if let Err(error) = self.join_tasks() {
                return Some(error);
            }
        }
        self.end();
        None
    }

    /// A task that panicked leaves its partitions as they were for ever: nothing but a restart helps.
    fn join_tasks(&mut self) -> Result<()> {
        while let Some(joined) = self.tasks.try_join_next() {
            if let Some(panic) = joined.err().and_then(|error| error.try_into_panic().ok()) {
                return Err(Error::bug(format!("a task of the ingest panicked: {}", panic_text(panic))));
            }
        }
        Ok(())
    }

    /// Warns where the inbox forgets sooner than Kafka does.
    fn look_at_retention(&mut self) {
        let Some(window) = self.window else { return };
        let topics = self.intake.rules.topics().map(str::to_owned).collect();
        let asking = retention::warn_if_shorter(self.config.clone(), self.group().to_owned(), topics, window);
        self.tasks.spawn_on(asking, self.intake.store.backend.reactor());
    }

    /// For people who look from outside.
    fn tell_intake(&self) {
        self.intake.hand_over().inspect(|hand_over| hand_over.note_intake(self.is_open));
    }

    fn group(&self) -> &str {
        &self.consumer.context().group
    }

    /// Pauses and resumes partitions, as there is room for their records.
    fn pause_and_resume(&mut self) {
        let context = self.consumer.context();
        let Pauses { pause, resume, held_back, let_go, is_closed } = context.desk().pauses(!context.is_backlogged());
        if is_closed == self.is_open {
            self.is_open = !is_closed;
            self.tell_intake();
            events::kafka::intake(self.group(), self.is_open);
        }
        held_back
            .iter()
            .for_each(|(topic, partition)| events::kafka::partition_paused(self.group(), topic, *partition));
        let_go.iter().for_each(|(topic, partition)| events::kafka::partition_resumed(self.group(), topic, *partition));
        let paused = partitions(&pause).map(|list| self.consumer.pause(&list));
        let resumed = positions(&resume).map(|list| self.consumer.resume(&list));
        for error in [paused, resumed].into_iter().flatten().filter_map(std::result::Result::err) {
            self.consumer.context().tell_trouble("pause or resume", &error);
        }
        // librdkafka looks for resumed partitions once a second. Setting a position wakes its fetcher up; they are there already.
        for (place, is_set) in self.seek(&resume) {
            if let Err(error) = is_set {
                self.consumer.context().tell_trouble("resume", &error);
                self.consumer.context().desk().ask_again(&place, Instant::now());
            }
        }
    }

    fn commit_when_due(&mut self) {
        let now = Instant::now();
        if now < self.commit_at {
            return;
        }
        self.commit_at = now + COMMIT_EVERY;
        if self.consumer.context().is_cut_off() {
            self.call_brokers();
        } else {
            self.commit(CommitMode::Async);
        }
    }

    /// Looks whether a broker is there again: any, because what waits to be committed may be of partitions whose leader is another one.
    fn call_brokers(&mut self) {
        let Some((topic, _)) = self.consumer.context().desk().places().pop() else { return };
        let consumer = Arc::downgrade(&self.consumer);
        let calling = move || {
            let Some(consumer) = consumer.upgrade() else { return };
            if consumer.fetch_metadata(Some(&topic), COMMIT_EVERY).is_ok() {
                consumer.context().is_heard();
            }
        };
        // A blocking call: not on the store's thread.
        let calling = async { drop(tokio::task::spawn_blocking(calling).await) };
        self.tasks.spawn_on(calling, self.intake.store.backend.reactor());
    }

    fn commit(&self, mode: CommitMode) {
        let stored = self.consumer.context().desk().to_commit();
        if let Some(list) = offsets(&stored)
            && let Err(error) = match mode {
                CommitMode::Async => native::commit(&self.consumer, &list),
                CommitMode::Sync => self.consumer.commit(&list, mode),
            }
        {
            // Tried again with what is stored by then.
            self.consumer.context().tell_trouble("commit", &error);
        }
    }

    /// Reads what is there, at most a few batches; returns how many records that were.
    fn read(&self) -> Result<usize> {
        let mut wait = self.poll_wait;
        let mut count = 0;
        // Once for all of them: it only says from when on a position may be asked for anew.
        let now = Instant::now();
        while count < self.intake.limits.accept_batch_rows * READ_BATCHES {
            match self.consumer.poll(wait) {
                None => break,
                Some(Ok(message)) if self.take_in(&message, now) => return Ok(count + 1),
                Some(Ok(_)) => {}
                // Reported by the context, which was given it with more words.
                Some(Err(_)) => self.judge()?,
            }
            count += 1;
            wait = Duration::ZERO;
        }
        Ok(count)
    }

    /// Returns whether no more may wait now, of this partition or of all.
    fn take_in(&self, message: &BorrowedMessage<'_>, now: Instant) -> bool {
        let context = self.consumer.context();
        let place = (message.topic(), message.partition());
        context.is_heard();
        let low = || native::low_watermark(&self.consumer, place.0, place.1);
        let at = At { offset: message.offset(), epoch: native::epoch::leader_epoch(message) };
        let expected = context.desk().expects(place, at, now, low);
        match expected {
            Expected::Yes => {
                // Without the desk: a large record takes its time, and the lanes go on meanwhile.
                let (topic, reader) = (self.intake.rules.shared_name(place.0), context.reader());
                let row = self.intake.row(record::read(message, topic, reader.as_deref()));
                let mut desk = context.desk();
                desk.take_in(place, at, row);
                desk.is_full(place, &self.intake.limits)
            }
            Expected::No => false,
            Expected::OutOfPlace => {
                events::kafka::out_of_place(self.group(), place.0, place.1, message.offset());
                false
            }
        }
    }

    /// Errors of librdkafka pass, unless it says that they do not.
    fn judge(&self) -> Result<()> {
        let Some((code, reason)) = self.consumer.client().fatal_error() else { return Ok(()) };
        Err(Error::new(
            Kind::Configuration,
            format!(
                "the consumer of group {} cannot go on: {code}: {reason} (two processes with one group.instance.id put each other out)",
                self.group()
            ),
        ))
    }

    fn watch_backlog(&mut self) {
        let limits = &self.intake.limits;
        if limits.backlog_rows_max.is_none() && limits.backlog_age_max.is_none() {
            return;
        }
        let (intake, tell) = (Arc::clone(&self.intake), self.tell.clone());
        let watching = async move {
            loop {
                if let Some(is_over) = backlog::is_over(&intake).await
                    && tell.send(Notice::Backlog { is_over }).is_err()
                {
                    return;
                }
                tokio::time::sleep(BACKLOG_EVERY).await;
            }
        };
        self.tasks.spawn_on(watching, self.intake.store.backend.reactor());
    }

    /// What waits is left to the next owner; what is being written gets some time, and is committed.
    fn end(&mut self) {
        let context = self.consumer.context();
        let places = context.desk().places();
        context.desk().drop_waiting(&places);
        context.wait_written(&places, Instant::now() + LAST_BATCHES);
        self.commit(CommitMode::Sync);
        context.set_closing();
        self.tasks.abort_all();
        watch::end(&self.intake, self.group());
        // Dropping the consumer leaves the group.
    }
}

//! The ingest: a thread that polls Kafka, passes batches to the store and commits the offsets of stored records.
//!
//! Tasks write the batches. The thread waits for them only for a bounded time: for room, at a revocation, at its end.
//! When the database is away or too many records wait, partitions are paused and polling continues, so the process
//! stays in the group. The thread ends by itself only after a failed subscription, a fatal librdkafka error or a panic.

mod backlogged;
mod batches;
mod committing;
mod positioning;
mod topics;
mod undecoded;

use std::cell::RefCell;
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
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout_at;

use super::assigned::{AssignedPartitions, Expected, Pauses, Wait};
use super::condition::Condition;
use super::position::At;
use super::rebalance::{Context, Notice, partitions};
use super::sources::ReadTopics;
use super::token::TokenProvider;
use super::{Kafka, native, record, settings, watch};
use crate::accept::{Decision, Intake, Undecided};
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::{Error, HealthReason, Kind, Result, SourceName, panic_text};
use positioning::positions;

/// How often offsets are committed. A crash in between loses nothing, because the ledger has the positions.
const COMMIT_EVERY: Duration = Duration::from_secs(1);
/// The longest wait for a record, and so the longest delay before a notice is handled.
const POLL_MAX: Duration = Duration::from_millis(50);
const POLL_MIN: Duration = Duration::from_millis(1);
/// How many batches are read before the loop checks whether one can be written.
const READ_BATCHES: usize = 2;
/// How long the end of the ingest waits for batches that are being written.
const LAST_BATCHES: Duration = Duration::from_secs(3);

/// A running ingest. Dropping it stops it.
pub(crate) struct Ingest {
    is_stopping: Arc<AtomicBool>,
    /// Receives the error that ended the thread, or `None` if the thread was stopped. Unset after that.
    ended: Option<oneshot::Receiver<Option<Error>>>,
    failure: Option<Error>,
    condition: Condition,
}

impl Ingest {
    /// Checks the settings and creates the consumer. Kafka need not be reachable.
    pub(crate) fn prepare<B: Backend>(
        intake: &Arc<Intake<B>>,
        kafka: &Kafka,
        window: Option<Duration>,
    ) -> Result<ReadyIngest<B>> {
        let config = settings::config(kafka)?;
        let (tell, told) = channel();
        let unknown = kafka.begins.unknown(|name| intake.rules.is_wanted(name));
        if !unknown.is_empty() {
            let topics = unknown.join(", ");
            return Err(Error::configuration(format!(
                "Kafka::begin names topics that no handler subscribes to: {topics}"
            )));
        }
        // Weak, because health checks hold this closure: after the inbox has ended, they must not keep its store open.
        let asked = Arc::downgrade(intake);
        let in_order = move |topic: &str| asked.upgrade().is_some_and(|intake| intake.rules.is_in_order(topic));
        let assigned = AssignedPartitions::new(intake.limits.accept_batches, Box::new(in_order));
        let context = Context::new(kafka.source_name(), kafka.begins.clone(), told, assigned);
        let consumer: BaseConsumer<Context> = config.create_with_context(context).map_err(settings::refused)?;
        Ok(ReadyIngest(Work {
            intake: Arc::clone(intake),
            topics: Arc::new(ReadTopics::new(kafka, intake)),
            window,
            consumer: Arc::new(consumer),
            config,
            tokens: kafka.tokens.clone(),
            tasks: JoinSet::new(),
            tell,
            is_stopping: Arc::new(AtomicBool::new(false)),
            is_open: true,
            undecided: RefCell::default(),
            decoding: Vec::new(),
            commit_at: Instant::now() + COMMIT_EVERY,
            poll_wait: POLL_MIN,
        }))
    }

    /// Stops reading and waits until the thread has finished the running writes, committed and left the group, or until
    /// the deadline. After the deadline the thread continues by itself.
    pub(crate) async fn end(mut self, deadline: Instant) {
        self.is_stopping.store(true, Ordering::Relaxed);
        if let Some(ended) = &mut self.ended {
            let _ = timeout_at(deadline.into(), ended).await;
        }
    }

    /// Returns a function that lists health problems.
    pub(crate) fn health<B: Backend>(
        &self,
        intake: &Arc<Intake<B>>,
    ) -> impl Fn() -> Vec<HealthReason> + Send + Sync + use<B> {
        let (condition, intake) = (self.condition.clone(), Arc::downgrade(intake));
        move || {
            let cluster = condition.cluster_id();
            condition.reasons(intake.upgrade().and_then(|intake| intake.stopped_why(cluster.as_deref()?)))
        }
    }

    /// Resolves with the error that ended the ingest. Stays pending while there is none.
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
        let source = self.0.source().clone();
        let (end, ended) = oneshot::channel();
        let condition = Condition::of(self.0.consumer.context());
        let failed = condition.failed();
        let work = move || {
            let run = catch_unwind(AssertUnwindSafe(|| self.0.run()));
            let panicked = |panic| Error::bug(format!("the ingest thread panicked ({source}): {}", panic_text(panic)));
            let failure = run.unwrap_or_else(|panic| Some(panicked(panic)));
            events::kafka::note_intake(&source, false);
            if let Some(error) = &failure {
                events::kafka::ingest_failed(&source, error);
                // Cannot fail, because it is set only here.
                let _ = failed.set(error.to_string());
                intake.hand_over().inspect(|hand_over| hand_over.note_intake(&source.name, false));
            }
            drop(end.send(failure));
        };
        // `ended` replaces a join, so that waiting is bounded: closing a consumer may wait for brokers that are away.
        thread::Builder::new()
            .name("wharf-kafka".to_owned())
            .spawn(work)
            .map_err(|error| Error::configuration("cannot start the ingest thread").with_source(error))?;
        Ok(Ingest { is_stopping, ended: Some(ended), failure: None, condition })
    }
}

impl Drop for Ingest {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }
}

/// The state of the ingest thread.
struct Work<B: Backend> {
    intake: Arc<Intake<B>>,
    /// The topics that are read from this source.
    topics: Arc<ReadTopics>,
    /// The minimum time for which the inbox keeps an identity; `None` when it never deletes them.
    window: Option<Duration>,
    consumer: Arc<BaseConsumer<Context>>,
    config: ClientConfig,
    tokens: Option<TokenProvider>,
    /// Running writes and requests, on the store's thread. Aborted when the ingest ends.
    tasks: JoinSet<()>,
    tell: Sender<Notice>,
    is_stopping: Arc<AtomicBool>,
    /// Whether records are read: not all partitions lack room, and the backlog is within its limits.
    is_open: bool,
    /// Records whose identity cannot be decoded yet and that have no task. Used by this thread only.
    undecided: RefCell<Vec<(Wait, Undecided)>>,
    /// Tasks that wait for decoders, one for each partition that waits.
    decoding: Vec<(Wait, AbortHandle)>,
    commit_at: Instant,
    /// Short under load; doubled while nothing happens.
    poll_wait: Duration,
}

impl<B: Backend> Work<B> {
    /// The loop of the thread. Returns the error that ended it; `None` if it was stopped.
    fn run(mut self) -> Option<Error> {
        events::kafka::begin_counting(self.source());
        if let Err(error) = self.subscribe() {
            return Some(error);
        }
        self.keep_token();
        self.watch_backlog();
        let watching = watch::run(Arc::clone(&self.intake), &self.consumer, Arc::clone(&self.topics));
        self.tasks.spawn_on(watching, self.intake.store.backend.reactor());
        self.tell_intake();
        while !self.is_stopping.load(Ordering::Relaxed) {
            let is_told = self.consumer.context().handle_notices(Duration::ZERO);
            self.follow_topics();
            self.position_partitions();
            self.ask_decoders();
            self.start_batches();
            self.pause_and_resume();
            self.commit_when_due();
            if self.consumer.context().assigned().waits_for_room(&self.intake.limits, Instant::now()) {
                // When a batch ends, its lane takes the next one, which makes room.
                self.consumer.context().handle_notices(POLL_MAX);
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

    /// Removes ended tasks. A panic is an error: the partitions of that task would make no progress until a restart.
    fn join_tasks(&mut self) -> Result<()> {
        while let Some(joined) = self.tasks.try_join_next() {
            if let Some(panic) = joined.err().and_then(|error| error.try_into_panic().ok()) {
                let panic = panic_text(panic);
                return Err(Error::bug(format!("an ingest task panicked ({}): {panic}", self.source())));
            }
        }
        Ok(())
    }

    /// Publishes whether records are read.
    fn tell_intake(&self) {
        events::kafka::note_intake(self.source(), self.is_open);
        self.intake.hand_over().inspect(|hand_over| hand_over.note_intake(&self.source().name, self.is_open));
    }

    fn source(&self) -> &SourceName {
        &self.consumer.context().source
    }

    /// Pauses and resumes partitions, depending on their state, the room for their records and the backlog.
    fn pause_and_resume(&mut self) {
        let context = self.consumer.context();
        let Pauses { pause, resume, full, drained, is_closed } = context.assigned().pauses(!context.is_backlogged());
        if is_closed == self.is_open {
            self.is_open = !is_closed;
            self.tell_intake();
            events::kafka::intake(self.source(), self.is_open);
        }
        full.iter().for_each(|(topic, partition)| events::kafka::partition_paused(self.source(), topic, *partition));
        drained
            .iter()
            .for_each(|(topic, partition)| events::kafka::partition_resumed(self.source(), topic, *partition));
        let paused = partitions(&pause).map(|list| self.consumer.pause(&list));
        let resumed = positions(&resume).map(|list| self.consumer.resume(&list));
        for error in [paused, resumed].into_iter().flatten().filter_map(std::result::Result::err) {
            self.consumer.context().report_error("pause or resume", &error);
        }
        // librdkafka checks for resumed partitions only once a second; seeking to the current position wakes its
        // fetcher.
        for (place, is_set) in self.seek(&resume) {
            if let Err(error) = is_set {
                self.consumer.context().report_error("resume", &error);
                self.consumer.context().assigned().ask_again(&place, Instant::now());
            }
        }
    }

    /// Reads available records, at most `READ_BATCHES` batches; returns how many. Waits only for the first record.
    fn read(&self) -> Result<usize> {
        let mut wait = self.poll_wait;
        let mut count = 0;
        // One timestamp for all records: it only sets when a position may be requested again.
        let now = Instant::now();
        while count < self.intake.limits.accept_batch_rows * READ_BATCHES {
            match self.consumer.poll(wait) {
                None => break,
                Some(Ok(message)) if self.take_in(&message, now) => return Ok(count + 1),
                Some(Ok(_)) => {}
                // The context has reported it already, with more detail.
                Some(Err(_)) => self.judge()?,
            }
            count += 1;
            wait = Duration::ZERO;
        }
        Ok(count)
    }

    /// Decides a record and queues it. Returns whether reading must stop: a queue is full, or it waits for a decoder.
    fn take_in(&self, message: &BorrowedMessage<'_>, now: Instant) -> bool {
        let context = self.consumer.context();
        let place = (message.topic(), message.partition());
        context.broker_answered();
        let low = || native::low_watermark(&self.consumer, place.0, place.1);
        let at = At { offset: message.offset(), epoch: native::epoch::leader_epoch(message) };
        let expected = context.assigned().expects(place, at, now, low);
        match expected {
            Expected::Yes => {
                events::kafka::consumed(place.0);
                // The partitions are not locked here: a large record takes time, and the lanes need the lock meanwhile.
                let (topic, reader) = (self.intake.rules.shared_name(place.0), context.reader());
                let record = record::read(message, topic, reader.as_deref());
                let row = match self.intake.decide(record) {
                    Decision::Decided(row) => row,
                    Decision::NotYet(undecided) => return self.wait_for_decoder(undecided, place.1, at, now),
                };
                let mut assigned = context.assigned();
                assigned.take_in(place, at, row);
                assigned.is_full(place, &self.intake.limits)
            }
            Expected::No => false,
            Expected::OutOfPlace => {
                events::kafka::out_of_place(self.source(), place.0, place.1, message.offset());
                false
            }
        }
    }

    /// Returns librdkafka's fatal error, if there is one; other errors are temporary.
    fn judge(&self) -> Result<()> {
        let Some((code, reason)) = self.consumer.client().fatal_error() else { return Ok(()) };
        Err(Error::new(
            Kind::Configuration,
            format!(
                "the consumer of {} cannot continue: {code}: {reason} (two processes with the same group.instance.id fence each other)",
                self.source()
            ),
        ))
    }

    /// Drops waiting records (the next owner reads them again), waits for running writes, and commits. While no broker
    /// answers, a commit would block for the session timeout, and the ledger has the positions.
    fn end(&mut self) {
        let context = self.consumer.context();
        let places = context.assigned().places();
        context.assigned().drop_waiting(&places);
        context.wait_written(&places, Instant::now() + LAST_BATCHES);
        if !context.is_cut_off() {
            self.commit(CommitMode::Sync);
        }
        context.set_closing();
        self.tasks.abort_all();
        watch::end(&self.intake, self.source());
        // Dropping the consumer leaves the group.
    }
}

//! Requests that fail, brokers that stop and return, leaders and coordinators that move: reading continues, and in the
//! end everything is committed. On librdkafka's mock cluster, which can be made to fail.

use std::time::Duration;

use rdkafka::types::RDKafkaApiKey::{self, *};
use rdkafka::types::RDKafkaRespErr::{self, *};
use tracing::Level;
use wharf::health::Health;
use wharf::kafka::Kafka as Source;
use wharf::{Postgres, Running};

use super::sources::until;
use super::stage::{Stage, end, range};
use crate::scene::{Runs, within};
use support::events::{Event, Events};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::mock_kafka::{MockBrokers, MockKafka};

/// The interval between two checks of the committed offset: the mock cluster emits no event to wait for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A stage on a mock cluster.
struct MockStage {
    mock: MockKafka,
    stage: Stage,
    runs: Runs,
}

impl MockStage {
    async fn new(brokers: i32) -> Self {
        let mock = MockKafka::start(brokers);
        let topic = unique_name("topic");
        mock.create_topic(&topic, 1);
        let stage = Stage::about(Kafka::at(mock.brokers()), topic).await;
        Self { mock, stage, runs: Runs::new() }
    }

    async fn start(&self) -> Running<Postgres> {
        self.stage.start_from(quick(self.stage.source()), &self.runs).await
    }

    /// Produces three more records and waits until they have run.
    async fn three_more(&self) {
        let first = self.stage.produce(0, 3).await;
        self.runs.reached(usize::try_from(first).unwrap() + 3).await;
    }

    async fn is_committed(&self, offset: i64) {
        within(async {
            while self.stage.committed(0).await != Some(offset) {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        })
        .await;
    }

    /// Asserts that everything is stored, ran once, and is committed while the inbox runs.
    async fn ends_well(self, running: Running<Postgres>, count: i64) {
        self.is_committed(count).await;
        end(running).await;
        assert_eq!(self.stage.positions().await, range(0, 0..count));
        assert_eq!(self.runs.count(), usize::try_from(count).unwrap());
        assert_eq!(self.stage.gaps().await, Vec::<String>::new());
    }
}

/// Quick to reconnect. The mock group takes three seconds to form, and waits for a session timeout if a member rejoins
/// at the wrong moment or was removed.
fn quick(source: Source) -> Source {
    source
        .set("reconnect.backoff.ms", "20")
        .set("reconnect.backoff.max.ms", "200")
        .set("retry.backoff.ms", "20")
        .set("session.timeout.ms", "6000")
}

/// Each case on a separate cluster, concurrently.
async fn all_continue_after(failures: impl IntoIterator<Item = (RDKafkaApiKey, RDKafkaRespErr)>) {
    let tasks: Vec<_> =
        failures.into_iter().map(|(kind, error)| ((kind, error), tokio::spawn(continues_after(kind, error)))).collect();
    let mut stuck = Vec::new();
    for (failure, task) in tasks {
        if task.await.is_err() {
            stuck.push(failure);
        }
    }
    assert!(stuck.is_empty(), "no progress after {stuck:?}");
}

/// Two requests of this kind fail before records are read, and one while they are read.
async fn continues_after(kind: RDKafkaApiKey, error: RDKafkaRespErr) {
    let on = MockStage::new(1).await;
    on.mock.fail_requests(kind, &[error; 2]);
    let running = on.start().await;
    on.three_more().await;
    on.mock.fail_requests(kind, &[error]);
    on.three_more().await;
    // The test's own requests must not fail.
    if kind != OffsetCommit {
        on.mock.clear_failures(kind);
    }
    on.ends_well(running, 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_commits_stop_nothing_and_succeed_in_the_end() {
    let events = Events::capture();
    let errors = [
        RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
        RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
        RD_KAFKA_RESP_ERR_NOT_COORDINATOR,
        RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION,
        RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID,
        RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS,
        RD_KAFKA_RESP_ERR_INVALID_COMMIT_OFFSET_SIZE,
        RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE,
        RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED,
        RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
        RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
        RD_KAFKA_RESP_ERR_UNKNOWN,
        RD_KAFKA_RESP_ERR__TRANSPORT,
    ];

    all_continue_after(errors.map(|error| (OffsetCommit, error))).await;

    let told = events.matching(|event| event.has("operation", "commit"));
    let is_told = told.iter().any(|event| event.fields["error"].contains("OffsetMetadataTooLarge"));
    assert!(is_told, "a failed commit is reported: {told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_join_of_the_group_is_retried() {
    let failures = [
        (FindCoordinator, RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE),
        (FindCoordinator, RD_KAFKA_RESP_ERR__TRANSPORT),
        (JoinGroup, RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS),
        (JoinGroup, RD_KAFKA_RESP_ERR_NOT_COORDINATOR),
        (JoinGroup, RD_KAFKA_RESP_ERR__TRANSPORT),
        (SyncGroup, RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS),
        (SyncGroup, RD_KAFKA_RESP_ERR__TRANSPORT),
        (Heartbeat, RD_KAFKA_RESP_ERR_NOT_COORDINATOR),
        (Heartbeat, RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID),
    ];
    all_continue_after(failures).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_requests_for_positions_are_retried() {
    let failures = [
        (OffsetFetch, RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS),
        (OffsetFetch, RD_KAFKA_RESP_ERR_NOT_COORDINATOR),
        (OffsetFetch, RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED),
        (OffsetFetch, RD_KAFKA_RESP_ERR__TRANSPORT),
        (ListOffsets, RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE),
        (ListOffsets, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED),
        (ListOffsets, RD_KAFKA_RESP_ERR_UNKNOWN),
        (ListOffsets, RD_KAFKA_RESP_ERR__TRANSPORT),
    ];
    all_continue_after(failures).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_fetches_lose_and_repeat_nothing() {
    let errors = [
        RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
        RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
        RD_KAFKA_RESP_ERR_KAFKA_STORAGE_ERROR,
        RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        // A consumer that believed this error would start from the beginning.
        RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE,
        RD_KAFKA_RESP_ERR_UNKNOWN,
        RD_KAFKA_RESP_ERR__TRANSPORT,
    ];
    all_continue_after(errors.map(|error| (Fetch, error))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_that_return_are_found_again() {
    let on = MockStage::new(3).await;
    let running = on.start().await;
    on.three_more().await;
    on.is_committed(3).await;

    let events = Events::capture();
    on.mock.take_down(MockBrokers::All);
    let are_gone = |event: &Event| {
        event.has("group", &on.stage.group)
            && event.field("error").is_some_and(|error| error.contains("AllBrokersDown"))
    };
    events.wait_for(are_gone).await;
    on.mock.bring_up(MockBrokers::All);

    on.three_more().await;
    on.ends_well(running, 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_that_starts_before_its_brokers_begins_when_they_are_up() {
    let on = MockStage::new(1).await;
    on.mock.take_down(MockBrokers::All);
    let running = on.start().await;
    on.mock.bring_up(MockBrokers::All);
    on.three_more().await;
    on.ends_well(running, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leaders_and_coordinators_may_move() {
    let on = MockStage::new(3).await;
    on.mock.set_leader(&on.stage.topic, 0, Some(1));
    on.mock.set_coordinator(&on.stage.group, 1);
    let running = on.start().await;
    on.three_more().await;

    on.mock.set_leader(&on.stage.topic, 0, Some(2));
    on.three_more().await;
    on.mock.set_leader(&on.stage.topic, 0, None);
    on.mock.set_coordinator(&on.stage.group, 3);
    on.mock.set_leader(&on.stage.topic, 0, Some(3));
    on.three_more().await;

    on.ends_well(running, 9).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_high_latency_is_only_slow() {
    let on = MockStage::new(1).await;
    on.mock.set_round_trip(MockBrokers::All, Duration::from_millis(300));
    let running = on.start().await;
    on.three_more().await;
    on.three_more().await;
    on.ends_well(running, 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_brokers_are_reported_rarely_and_their_return_once() {
    let on = MockStage::new(1).await;
    let running = on.start().await;
    on.three_more().await;
    on.is_committed(3).await;
    let events = Events::capture();
    let is_ours = |event: &Event| event.target == "wharf::kafka" && event.has("group", &on.stage.group);
    on.mock.take_down(MockBrokers::All);

    events.wait_for_count(40, is_ours).await;

    let warned = events.matching(|event| is_ours(event) && event.level <= Level::WARN);
    assert!(warned.len() <= 5, "{warned:?}");
    let away = events.wait_for(|event| is_ours(event) && event.field("for_secs").is_some()).await;
    assert_eq!(away.message, "kafka error");
    on.mock.bring_up(MockBrokers::All);
    events.wait_for(|event| is_ours(event) && event.message == "brokers are back").await;
    on.ends_well(running, 3).await;
}

// No record is read any more, so only the commit itself can show that the coordinator is available.
#[tokio::test(flavor = "multi_thread")]
async fn stored_records_are_committed_although_the_leader_of_their_partition_is_gone() {
    let on = MockStage::new(3).await;
    on.mock.set_coordinator(&on.stage.group, 1);
    on.mock.set_leader(&on.stage.topic, 0, Some(3));
    let running = on.start().await;
    on.mock.fail_requests(OffsetCommit, &[RD_KAFKA_RESP_ERR_INVALID_COMMIT_OFFSET_SIZE; 100]);
    on.three_more().await;
    let events = Events::capture();
    on.mock.take_down(MockBrokers::One(3));
    events.wait_for(|event| event.has("group", &on.stage.group) && event.field("for_secs").is_some()).await;

    on.mock.clear_failures(OffsetCommit);

    on.is_committed(3).await;
    end(running).await;
}

// A group may have more readers than partitions.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_without_a_partition_notices_that_brokers_are_back() {
    let mock = MockKafka::start(1);
    let stage = Stage::about(Kafka::at(mock.brokers()), unique_name("absent")).await;
    let events = Events::capture();
    let is_ours = |event: &Event| event.has("group", &stage.group);
    let running = stage.start_from(quick(stage.source()), &Runs::new()).await;
    mock.take_down(MockBrokers::All);
    let are_gone = |event: &Event| is_ours(event) && event.field("error").is_some_and(|e| e.contains("AllBrokersDown"));
    events.wait_for(are_gone).await;
    let is_cut_off = |health: &Health| health.to_string().contains("no broker answers");
    assert!(is_cut_off(&running.health()), "{}", running.health());
    mock.bring_up(MockBrokers::All);

    // The event `brokers are back` follows only an outage of a second or longer.
    until(&running.monitor(), |health| !is_cut_off(health)).await;

    end(running).await;
}

// A commit would wait for the session timeout, and what comes after it would not happen in time.
#[tokio::test(flavor = "multi_thread")]
async fn an_ingest_that_ends_without_brokers_removes_its_row() {
    let on = MockStage::new(1).await;
    on.mock.fail_requests(OffsetCommit, &[RD_KAFKA_RESP_ERR_INVALID_COMMIT_OFFSET_SIZE; 1_000]);
    let running = on.start().await;
    on.three_more().await;
    let events = Events::capture();
    on.mock.take_down(MockBrokers::All);
    let is_gone = |event: &Event| {
        event.has("group", &on.stage.group)
            && event.field("error").is_some_and(|error| error.contains("AllBrokersDown"))
    };
    events.wait_for(is_gone).await;

    running.shutdown(Duration::ZERO).await.unwrap();

    assert_eq!(on.stage.scene.count("inbox_ingest").await, 0);
}

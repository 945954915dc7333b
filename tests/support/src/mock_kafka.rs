//! librdkafka's mock cluster: brokers in this process that start at once and fail on request.
//!
//! It is for faults that cannot be caused in a real broker. It keeps 5 MiB per partition, and its transactions are not
//! reliable: guarantees about Kafka are tested on [`crate::kafka::Kafka`].

use std::sync::mpsc;
use std::time::Duration;

use rdkafka::error::KafkaResult;
use rdkafka::mocking::{MockCluster, MockCoordinator};
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

type Cluster = MockCluster<'static, DefaultProducerContext>;
type Order = Box<dyn FnOnce(&Cluster) + Send>;

/// A mock cluster; removed when dropped. A call has taken effect when it returns.
#[derive(Debug)]
pub struct MockKafka {
    brokers: String,
    /// The queue to the thread that owns the cluster. The cluster is not `Send`, so a spawned task could not hold it
    /// across an await.
    orders: mpsc::Sender<Order>,
}

/// The brokers that a call applies to. Their ids begin with 1.
#[derive(Clone, Copy, Debug)]
pub enum MockBrokers {
    All,
    One(i32),
}

impl MockBrokers {
    fn id(self) -> i32 {
        match self {
            MockBrokers::All => -1,
            MockBrokers::One(id) => id,
        }
    }
}

impl MockKafka {
    pub fn start(broker_count: i32) -> MockKafka {
        let (orders, inbox) = mpsc::channel::<Order>();
        let (started, brokers) = mpsc::channel();
        let serve = move || {
            let cluster = MockCluster::new(broker_count).expect("a mock cluster");
            started.send(cluster.bootstrap_servers()).expect("whoever starts it waits");
            for order in inbox {
                order(&cluster);
            }
        };
        std::thread::Builder::new().name("mock kafka".to_owned()).spawn(serve).expect("cannot start a thread");
        MockKafka { brokers: brokers.recv().expect("the mock cluster starts"), orders }
    }

    /// For `bootstrap.servers`.
    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// Creates a topic. (A missing topic is created on its first use, with four partitions.)
    pub fn create_topic(&self, topic: &str, partitions: i32) {
        let topic = topic.to_owned();
        self.order(move |cluster| cluster.create_topic(&topic, partitions, 1));
    }

    /// The next requests of this kind fail with these errors, one each. `RD_KAFKA_RESP_ERR__TRANSPORT` closes the
    /// connection.
    pub fn fail_requests(&self, kind: RDKafkaApiKey, errors: &[RDKafkaRespErr]) {
        let errors = errors.to_vec();
        self.order(move |cluster| {
            cluster.request_errors(kind, &errors);
            Ok(())
        });
    }

    /// Removes the errors that have not occurred yet.
    pub fn clear_failures(&self, kind: RDKafkaApiKey) {
        self.order(move |cluster| {
            cluster.clear_request_errors(kind);
            Ok(())
        });
    }

    /// Metadata of the topic contains this error from now on.
    pub fn fail_topic(&self, topic: &str, error: RDKafkaRespErr) {
        let topic = topic.to_owned();
        self.order(move |cluster| cluster.topic_error(&topic, error));
    }

    /// Closes the connections of brokers and refuses new ones. The leaders do not change.
    pub fn take_down(&self, brokers: MockBrokers) {
        self.order(move |cluster| cluster.broker_down(brokers.id()));
    }

    pub fn bring_up(&self, brokers: MockBrokers) {
        self.order(move |cluster| cluster.broker_up(brokers.id()));
    }

    /// Makes a broker the leader of a partition; `None` leaves it without one.
    pub fn set_leader(&self, topic: &str, partition: i32, broker: Option<i32>) {
        let topic = topic.to_owned();
        self.order(move |cluster| cluster.partition_leader(&topic, partition, broker));
    }

    /// Makes a broker the coordinator of a group.
    pub fn set_coordinator(&self, group: &str, broker: i32) {
        let group = group.to_owned();
        self.order(move |cluster| cluster.coordinator(MockCoordinator::Group(group), broker));
    }

    /// Every response takes this long from now on.
    pub fn set_round_trip(&self, brokers: MockBrokers, delay: Duration) {
        self.order(move |cluster| cluster.broker_round_trip_time(brokers.id(), delay));
    }

    fn order(&self, order: impl FnOnce(&Cluster) -> KafkaResult<()> + Send + 'static) {
        let (done, result) = mpsc::channel();
        let order = move |cluster: &Cluster| drop(done.send(order(cluster)));
        self.orders.send(Box::new(order)).expect("the mock cluster lives");
        result.recv().expect("the mock cluster answers").expect("the mock cluster accepts the order");
    }
}

//! How a producer learns that brokers are back, and that dropping its records waits for no broker.

use rdkafka::mocking::MockCluster;

use super::*;
use crate::kafka::Relay;

/// Whether a broker answers. A busy machine may need several calls.
async fn reaches(producing: &mut Producing) -> bool {
    for _ in 0..30 {
        if producing.reaches_brokers().await {
            return true;
        }
    }
    false
}

#[tokio::test]
async fn an_answer_ends_an_outage_but_not_the_lack_of_a_token() {
    let cluster = MockCluster::new(1).unwrap();
    let config = settings::producer_config(&Relay::new(cluster.bootstrap_servers())).unwrap();
    let mut producing = Producing::new(&config, WireProblem::default(), None).unwrap();
    let producer = Arc::clone(producing.producer.as_ref().unwrap());
    let callbacks = producer.context();
    callbacks.error(KafkaError::Global(RDKafkaErrorCode::AllBrokersDown), "1/1 brokers are down");
    assert!(callbacks.outage.is_on());
    assert!(reaches(&mut producing).await);
    assert!(!callbacks.outage.is_on());

    callbacks.has_no_token("no route to the token service");
    assert!(!producing.reaches_brokers().await);
    callbacks.has_token();
    assert!(reaches(&mut producing).await);
}

// No test can block the thread of a broker, as a name server does that does not answer. So this tests what librdkafka is
// asked for.
#[test]
fn dropping_records_waits_for_no_broker_thread() {
    let flags = format!("{:?}", all_at_once());
    assert_eq!(flags.matches("true").count(), 3, "queued and sent records, without waiting: {flags}");
}

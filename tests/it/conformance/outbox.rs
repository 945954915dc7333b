//! The outbox on each store: a record that a handler publishes is sent if the handler's transaction commits, and
//! operators can show, resend and discard it.

use std::time::Duration;

use wharf::kafka::Relay;
use wharf::operate::{OutboxFilter, OutboxState};
use wharf::{Failure, Message, Outbox, Raw, Record, tx_handler, with_state};

use super::scene::{Connection, Db, Scene, key, within};
use support::mock_kafka::MockKafka;

/// Publishes the payload, and then does what the payload says.
async fn publish(outbox: Outbox<Db>, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
    let record = Record::new("out").with_key("k").with_payload(message.payload.to_vec());
    outbox.publish(conn, record).await?;
    match message.id() {
        "poison" => Err(Failure::poison("hopeless")),
        _ => Ok(()),
    }
}

async fn published(ids: &[&str]) -> Scene {
    let scene = Scene::new().await;
    let state = Outbox::new(&scene.store).with_source("/shop");
    let inbox = scene.inbox().subscribe("orders", tx_handler(key("stock"), with_state(state, publish)).concurrency(1));
    let inbox = inbox.build().unwrap();
    inbox.accept_all(ids.iter().map(|id| super::scene::record(id))).await.unwrap();
    inbox.drain().await.unwrap();
    scene
}

async fn until_sent(scene: &Scene, records: i64) {
    within(async {
        while scene.count("inbox_outbox WHERE status = 2").await < records {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn totals_count_unsent_and_quarantined_records() {
    let scene = published(&["a", "b"]).await;
    let inbox = scene.inbox().subscribe("orders", super::scene::Runs::new().handler("mail")).build().unwrap();
    inbox.accept_or_quarantine([Record::new("orders").with_payload("junk")]).await.unwrap();
    let totals = scene.store.operate().totals().await.unwrap();
    assert_eq!((totals.outbox_waiting, totals.outbox_poisoned, totals.quarantined), (2, 0, 1));
    assert!(totals.outbox_oldest_secs.is_some_and(|secs| secs >= 0.0), "{totals:?}");

    let empty = Scene::new().await.store.operate().totals().await.unwrap();
    assert_eq!((empty.outbox_waiting, empty.quarantined, empty.outbox_oldest_secs), (0, 0, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_a_handler_publishes_is_sent_only_if_it_commits() {
    let scene = published(&["a", "poison", "b"]).await;
    assert_eq!(scene.count("inbox_outbox").await, 2);
    let mock = MockKafka::start(1);
    mock.create_topic("out", 1);
    let relay = Relay::new(mock.brokers()).lease(Duration::from_secs(2)).start(&scene.store).unwrap();
    until_sent(&scene, 2).await;
    let sent = scene.store.operate().outbox(&OutboxFilter::default().state(OutboxState::Sent), 10).await.unwrap();
    assert_eq!(sent.len(), 2);
    assert!(sent.iter().all(|record| record.source == "/shop" && record.kafka_partition == Some(0)));
    let offsets: Vec<_> = {
        let mut by_id = sent.clone();
        by_id.sort_by_key(|record| record.id);
        by_id.iter().map(|record| record.kafka_offset).collect()
    };
    assert_eq!(offsets, [Some(0), Some(1)]);
    within(relay.shutdown(Duration::from_secs(5))).await;
    assert_eq!(scene.count("inbox_relay").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_show_resend_and_discard_outbox_records() {
    let scene = published(&["a", "b"]).await;
    let operator = scene.store.operate().acting_as("alice").because("a test");
    let waiting = OutboxFilter::default().state(OutboxState::Waiting);
    let listed = operator.outbox(&waiting, 10).await.unwrap();
    assert_eq!(listed.len(), 2);
    let details = operator.outbox_record(listed[0].id).await.unwrap().unwrap();
    assert_eq!(details.record.payload(), Some(b"payload of a".as_slice()));
    assert_eq!(details.record.headers().get("wharf_origin_id"), Some(b"a".as_slice()));

    assert!(operator.discard_outbox(&OutboxFilter::default(), 10).await.unwrap_err().is_configuration());
    assert_eq!(operator.replay_outbox(&OutboxFilter::all(), 10).await.unwrap(), 0);
    assert_eq!(operator.discard_outbox(&OutboxFilter::default().id(listed[0].id), 10).await.unwrap(), 1);
    assert_eq!(operator.outbox(&waiting, 10).await.unwrap().len(), 1);
    let discarded = OutboxFilter::default().state(OutboxState::Discarded).topic("out");
    let reason = operator.outbox(&discarded, 10).await.unwrap()[0].reason.clone();
    assert_eq!(reason.as_deref(), Some("a test"));
    assert_eq!(operator.replay_outbox(&discarded, 10).await.unwrap(), 1);
    let again = operator.outbox(&waiting, 10).await.unwrap();
    assert_eq!(again.iter().map(|record| record.replays).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(scene.count("inbox_audit WHERE actor = 'alice' AND action LIKE '%outgoing' AND affected = 1").await, 2);
    assert_eq!(scene.store.operate().discard_outbox(&OutboxFilter::default().id(listed[1].id), 10).await.unwrap(), 1);
    let reason = operator.outbox(&discarded, 10).await.unwrap()[0].reason.clone();
    assert_eq!(reason.as_deref(), Some("by a person"));

    let diagnosis = operator.doctor().await.unwrap();
    assert!(diagnosis.symptoms.iter().any(|symptom| symptom.code == "no relay"), "{:?}", diagnosis.symptoms);
}

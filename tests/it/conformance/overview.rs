//! Overviews for operators: groups of poisoned deliveries and quarantined records, the audit, and the state of each
//! partition.

use wharf::operate::{DeliveryFilter, LedgerFilter, QuarantineFilter};
use wharf::{Failure, Record};

use super::scene::{Runs, Scene, records};

#[tokio::test(flavor = "multi_thread")]
async fn poisoned_deliveries_are_grouped_by_handler_and_error_up_to_a_bound() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let mail = runs.answering("mail", |message| Err(Failure::poison(format!("no address for {}", message.id()))));
    let stock = runs.answering("stock", |message| match message.id() {
        "m000000" => Err(Failure::poison("no shelf")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", mail).subscribe("orders", stock).build().unwrap();
    inbox.accept_all(records(5)).await.unwrap();
    inbox.drain().await.unwrap();
    let operator = scene.store.operate();
    let counts = async |filter: DeliveryFilter, rows_max| -> Vec<(String, u64)> {
        let groups = operator.poisoned_groups(&filter, rows_max).await.unwrap();
        groups.into_iter().map(|group| (group.handler_key.unwrap(), group.poisoned)).collect()
    };

    // Five errors that differ in a number are one group, and many errors of one handler do not hide those of another.
    let both = [("mail".to_owned(), 5), ("stock".to_owned(), 1)];
    assert_eq!(counts(DeliveryFilter::default(), 100).await, both);
    assert_eq!(counts(DeliveryFilter::all(), 3).await, [("mail".to_owned(), 3), ("stock".to_owned(), 1)]);
    assert_eq!(counts(DeliveryFilter::default().error("SHELF"), 100).await, both[1..]);
    assert_eq!(counts(DeliveryFilter::default().handler_key("mail"), 100).await, both[..1]);
    assert_eq!(counts(DeliveryFilter::default().topic("other"), 100).await, []);
    let mistyped = operator.poisoned_groups(&DeliveryFilter::default().handler_key("mial"), 100).await;
    assert!(mistyped.unwrap_err().is_configuration());
}

#[tokio::test(flavor = "multi_thread")]
async fn quarantined_records_are_grouped_by_topic_and_reason() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let junk = (0..3).map(|number| Record::new("orders").with_payload(format!("junk {number}")));
    inbox.accept_or_quarantine(junk).await.unwrap();
    let operator = scene.store.operate();
    operator.replay_quarantined(&QuarantineFilter::default().id(1), 1).await.unwrap();

    let groups = operator.quarantine_groups(&QuarantineFilter::default(), 100).await.unwrap();
    let [group] = &groups[..] else { panic!("{groups:?}") };
    assert_eq!((group.topic.as_str(), group.reason.as_str()), ("orders", "missing identity"));
    assert_eq!((group.records, group.replay_asked), (3, 1));
    let none = operator.quarantine_groups(&QuarantineFilter::default().topic("other"), 100).await.unwrap();
    assert_eq!(none, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_is_read_from_the_newest_action_backwards() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all([]).await.unwrap();
    let operator = scene.store.operate().acting_as("alice").because("a drill");
    operator.pause("stock").await.unwrap();
    operator.resume("stock").await.unwrap();

    let newest = operator.audit(None, 1).await.unwrap();
    assert_eq!((newest[0].action.as_str(), newest[0].affected), ("resume", 1));
    let older = operator.audit(Some(newest[0].id), 10).await.unwrap();
    let [pause] = &older[..] else { panic!("{older:?}") };
    assert_eq!(pause.filter["handler_key"], "stock");
    assert_eq!((pause.actor.as_deref(), pause.because.as_deref()), (Some("alice"), Some("a drill")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_has_the_report_of_its_process_and_gaps_are_listed() {
    let scene = Scene::new().await;
    let rows = [
        "INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset, updated_at)
         VALUES ('shop', 'c', 'orders', 0, 17, now()), ('shop', 'c', 'orders', 1, 4, now())",
        "INSERT INTO inbox_partition (consumer_group, cluster_id, topic, kafka_partition, state, since, seen_at, lag, ingest)
         VALUES ('shop', 'c', 'orders', 0, 'reading', now(), now(), 3, 'host:1')",
        "INSERT INTO inbox_gap (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset, noticed_at)
         VALUES ('shop', 'c', 'orders', 1, 2, 4, now())",
    ];
    for row in rows {
        scene.database.execute(row).await;
    }
    let operator = scene.store.operate();
    let positions = operator.positions(&LedgerFilter::default(), 10).await.unwrap();
    let told: Vec<_> = positions.iter().map(|one| (one.state.as_deref(), one.lag, one.ingest.as_deref())).collect();
    assert_eq!(told, [(Some("reading"), Some(3), Some("host:1")), (None, None, None)]);
    let gaps = operator.gaps(&LedgerFilter::topic("shop", "orders"), 10).await.unwrap();
    assert_eq!((gaps[0].partition, gaps[0].from_offset, gaps[0].to_offset), (1, 2, 4));
    assert_eq!(operator.gaps(&LedgerFilter::topic("shop", "other"), 10).await.unwrap(), []);
}

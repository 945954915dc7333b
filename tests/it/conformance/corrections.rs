//! Corrected payloads: they are used for one handler and kept beside the original, which stays unchanged.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use wharf::operate::{DeliveryFilter, DeliverySummary};
use wharf::{Failure, Inbox, Message, Raw, Receipt, Record, Registration, Retention, handler};

use super::scene::{Database, Db, Runs, Scene, key, record};

type Seen = Arc<Mutex<Vec<(Vec<u8>, bool)>>>;

/// Poisons payloads that do not contain `right`; records the payloads and whether they were corrected.
fn picky(seen: &Seen) -> Registration<Db> {
    let seen = Arc::clone(seen);
    handler(key("picky"), move |message: Message<Raw>| {
        seen.lock().unwrap().push((message.payload.to_vec(), message.is_corrected()));
        let is_right = message.payload.windows(5).any(|part| part == b"right");
        async move { if is_right { Ok(()) } else { Err(Failure::poison("wrong")) } }
    })
}

/// One message poisoned for `picky` and done for `stock`.
async fn poisoned() -> (Scene, Inbox<Db>, Seen) {
    let (scene, seen) = (Scene::new().await, Seen::default());
    let stock = Runs::new().handler("stock");
    let inbox = scene.inbox().subscribe("orders", picky(&seen)).subscribe("orders", stock).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.states().await, ["a picky poisoned", "a stock done"]);
    (scene, inbox, seen)
}

async fn of_picky(scene: &Scene) -> DeliverySummary {
    let filter = DeliveryFilter::default().message_id("a").handler_key("picky");
    scene.store.operate().deliveries(&filter, None, 2).await.unwrap().remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_handler_gets_the_corrected_payload_and_the_original_stays() {
    let (scene, inbox, seen) = poisoned().await;
    let failed = of_picky(&scene).await;
    let operator = scene.store.operate().acting_as("alice").because("a typing error");
    // Bytes that are not text, for stores that keep text as text.
    let right = [b"right", &[0xff, 0x00][..]].concat();
    assert!(operator.replay_corrected(&failed, right.clone()).await.unwrap());
    assert_eq!(inbox.drain().await.unwrap(), 1);

    assert_eq!(scene.states().await, ["a picky done", "a stock done"]);
    assert_eq!(*seen.lock().unwrap(), [(b"payload of a".to_vec(), false), (right.clone(), true)]);
    let details = operator.delivery(&failed).await.unwrap().unwrap();
    assert_eq!(details.record.unwrap().payload(), Some(&b"payload of a"[..]));
    assert_eq!(&*details.correction.unwrap().payload, &*right);
    assert!(details.delivery.is_corrected && details.delivery.replays == 1);
    // The original record is still a duplicate, and the corrected payload is not a separate message.
    assert_eq!(inbox.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 0 });
    let audit = "SELECT concat_ws('|', action, affected, actor, because, filter->>'handler_key', filter->>'attempt',
                                  length(filter->>'payload_sha256')) FROM inbox_audit";
    assert_eq!(scene.database.query_texts(audit).await, ["replay corrected|1|alice|a typing error|picky|1|64"]);
    assert_eq!(scene.count("inbox_history").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn later_replays_use_the_newest_correction_and_other_handlers_the_original() {
    let (scene, inbox, seen) = poisoned().await;
    let operator = scene.store.operate();
    assert!(operator.replay_corrected(&of_picky(&scene).await, "still bad").await.unwrap());
    inbox.drain().await.unwrap();
    assert_eq!(scene.database.replay("a", "picky", None).await, 1);
    inbox.drain().await.unwrap();
    assert!(operator.replay_corrected(&of_picky(&scene).await, "all right").await.unwrap());
    inbox.drain().await.unwrap();
    let seen: Vec<String> = seen.lock().unwrap().iter().map(|(seen, _)| String::from_utf8_lossy(seen).into()).collect();
    assert_eq!(seen, ["payload of a", "still bad", "still bad", "all right"]);
    // A handler that is added later gets the original.
    let late = Runs::new().answering("late", |message| match &*message.payload {
        b"payload of a" if !message.is_corrected() => Ok(()),
        _ => Err(Failure::poison("not what came")),
    });
    let inbox = scene.inbox().subscribe("orders", late).build().unwrap();
    assert_eq!(inbox.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 1 });
    inbox.drain().await.unwrap();
    assert_eq!(scene.states().await, ["a late done", "a picky done", "a stock done"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correction_is_refused_when_nothing_changes_or_the_delivery_has_moved_on() {
    let (scene, inbox, _) = poisoned().await;
    let operator = scene.store.operate();
    let failed = of_picky(&scene).await;
    let unchanged = operator.replay_corrected(&failed, "payload of a").await.unwrap_err();
    assert!(unchanged.to_string().contains("the payload is unchanged"), "{unchanged}");
    assert!(operator.replay_corrected(&failed, "bad").await.unwrap());
    let pending = of_picky(&scene).await;
    assert!(!operator.replay_corrected(&pending, "worse").await.unwrap(), "it is pending");
    inbox.drain().await.unwrap();
    assert!(!operator.replay_corrected(&failed, "worse").await.unwrap(), "it has run since it was looked at");
    let unchanged = operator.replay_corrected(&of_picky(&scene).await, "bad").await.unwrap_err();
    assert!(unchanged.to_string().contains("the payload is unchanged"), "{unchanged}");
    let done = DeliveryFilter::default().message_id("a").handler_key("stock");
    let done = operator.deliveries(&done, None, 1).await.unwrap().remove(0);
    assert!(!operator.replay_corrected(&done, "worse").await.unwrap(), "it is done");
    assert_eq!(scene.count("inbox_correction").await, 1);
    assert_eq!(scene.states().await, ["a picky poisoned", "a stock done"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tombstone_can_be_corrected_and_corrections_are_deleted_with_their_message() {
    let (scene, seen) = (Scene::new().await, Seen::default());
    let inbox = scene.inbox().subscribe("orders", picky(&seen)).build().unwrap();
    inbox.accept_all([Record::new("orders").with_id("a"), record("b")]).await.unwrap();
    inbox.drain().await.unwrap();
    let operator = scene.store.operate();
    assert!(operator.replay_corrected(&of_picky(&scene).await, "right").await.unwrap());
    inbox.drain().await.unwrap();
    assert_eq!(scene.states().await, ["a picky done", "b picky poisoned"]);
    assert_eq!(scene.count("inbox_correction").await, 1);
    assert_eq!(scene.store.purge(&Retention::after(Duration::ZERO), |_| {}).await.unwrap().messages, 1);
    assert_eq!((scene.count("inbox_correction").await, scene.count("inbox_message").await), (0, 1));
}

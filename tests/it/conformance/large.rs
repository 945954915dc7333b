//! Large payloads: a claim does not load more of them than a handler can start or than may wait in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use wharf::operate::DeliveryFilter;
use wharf::{Failure, Message, Raw, handler};

use super::scene::{Runs, Scene, State, key, quick, record, records};

const SLOTS: usize = 2;
/// Runs that make the handler known as fast, with small messages.
const WARM_UP: usize = 200;
const LARGE: usize = 40;
const LARGE_BYTES: usize = 300_000;

fn large(number: usize) -> Vec<u8> {
    vec![u8::try_from(number).unwrap(); LARGE_BYTES + number]
}

/// 80,000 bytes in 20,000 characters: by their number it would not be large.
fn large_text(number: usize) -> Vec<u8> {
    format!("{}{number}", "\u{1f980}".repeat(20_000)).into_bytes()
}

/// Messages that become large do not exceed the memory for claimed ones: at most `held_max` of these wait or run.
async fn are_bounded(large: fn(usize) -> Vec<u8>, held_max: usize) {
    let scene = Scene::new().await;
    are_bounded_when(&scene, large, held_max, async || {
        // This inbox is not started, so its messages are claimed, not handed over.
        let elsewhere = scene.another_inbox().await.subscribe("orders", Runs::new().handler("stock")).build().unwrap();
        let large = (0..LARGE).map(|number| record(&format!("large-{number}")).with_payload(large(number)));
        elsewhere.accept_all(large).await.unwrap();
    })
    .await;
}

/// The same for payloads that become due, all at once, when `arrive` is called.
async fn are_bounded_when(scene: &Scene, large: fn(usize) -> Vec<u8>, held_max: usize, arrive: impl AsyncFnOnce()) {
    let (runs, gate) = (Runs::new(), watch::Sender::new(true));
    let whole = Arc::new(AtomicUsize::new(0));
    let (seen, noted, opened) = (Arc::clone(&whole), runs.clone(), gate.clone());
    let registration = handler(key("stock"), move |message: Message<Raw>| {
        if let Some(number) = message.id().strip_prefix("large-") {
            let expected = large(number.parse().unwrap());
            seen.fetch_add(usize::from(message.payload.0.as_deref() == Some(&expected[..])), Ordering::Relaxed);
        }
        noted.note(&message);
        let mut opened = opened.subscribe();
        async move {
            let _ = opened.wait_for(|is_open| *is_open).await;
            Ok::<(), Failure>(())
        }
    });
    let limits = quick().claim_ahead(Duration::from_secs(10)).claim_ahead_bytes(1 << 20);
    let registration = registration.concurrency(SLOTS);
    let inbox = scene.inbox().limits(limits).subscribe("orders", registration).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(WARM_UP)).await.unwrap();
    scene.settled().await;
    gate.send_replace(false);

    arrive().await;
    runs.reached(WARM_UP + SLOTS).await;

    // A claim asks for more as long as it takes the messages for small ones.
    let is_held = "FROM inbox_delivery WHERE locked_until IS NOT NULL";
    scene.until(&format!("SELECT (count(*) BETWEEN 2 AND {held_max})::int::bigint {is_held}")).await;
    gate.send_replace(true);
    scene.settled().await;
    assert_eq!((runs.count(), whole.load(Ordering::Relaxed)), (WARM_UP + LARGE, LARGE));
    assert_eq!(scene.count_done_uncharged().await, i64::try_from(WARM_UP + LARGE).unwrap());
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_become_large_do_not_exceed_the_memory_for_claimed_ones() {
    // Three fit into 1 MiB.
    are_bounded(large, 8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_size_of_a_text_is_its_bytes_not_its_characters() {
    // Thirteen fit into 1 MiB.
    are_bounded(large_text, 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn corrected_payloads_do_not_exceed_the_memory_for_claimed_messages() {
    let scene = Scene::new().await;
    let wrong = Runs::new().answering("stock", |_| Err(Failure::poison("wrong")));
    let inbox = scene.inbox().subscribe("orders", wrong).build().unwrap();
    inbox.accept_all((0..LARGE).map(|number| record(&format!("large-{number}")))).await.unwrap();
    inbox.drain().await.unwrap();
    drop(inbox);
    let operator = scene.store.operate();

    // Three fit into 1 MiB.
    are_bounded_when(&scene, large, 8, async || {
        assert!(operator.pause("stock").await.unwrap());
        let filter = DeliveryFilter::default().handler_key("stock");
        for poisoned in operator.deliveries(&filter, Some(State::Poisoned), 100).await.unwrap() {
            let number = poisoned.message_id.as_deref().and_then(|id| id.strip_prefix("large-")).unwrap();
            assert!(operator.replay_corrected(&poisoned, large(number.parse().unwrap())).await.unwrap());
        }
        assert!(operator.resume("stock").await.unwrap());
    })
    .await;
}

// A handler would take a message whose payload was not loaded for a tombstone, and delete what it should store.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_runs_alone_has_its_large_payload() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let is_whole = |message: &Message<Raw>| message.payload.0.as_deref() == Some(&large(7)[..]);
    let store = runs.answering("stock", move |message| match is_whole(message) {
        true => Ok(()),
        false => Err(Failure::poison("this is not the payload")),
    });
    let inbox = scene.inbox().subscribe("orders", store).build().unwrap();
    let suspects = ["crashed", "troubled"].map(|id| record(id).with_payload(large(7)));
    inbox.accept_all(suspects).await.unwrap();
    let message = |id: &str| format!("message_seq = (SELECT seq FROM inbox_message WHERE message_id = '{id}')");
    for (counter, id) in [("crashes = 2", "crashed"), ("store_errors = 6", "troubled")] {
        scene.database.execute(&format!("UPDATE inbox_delivery SET {counter} WHERE {}", message(id))).await;
    }

    inbox.drain().await.unwrap();

    assert_eq!(runs.sorted(), ["crashed", "troubled"]);
    assert_eq!(scene.states().await, ["crashed stock done", "troubled stock done"]);
}

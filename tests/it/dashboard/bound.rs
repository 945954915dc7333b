//! An action changes only what its preview showed: no other message, and none that matched only after the preview.

use wharf::{Failure, Record};

use super::forms::{ended, form, links, send};
use super::served::Served;
use crate::conformance::sqlite::scene::Scene;
use crate::scene::{Runs, record};

/// Accepts records and runs all due deliveries; each one is poisoned.
async fn poison(scene: &Scene, ids: &[&str]) {
    let broken = Runs::new().answering("stock", |_| Err(Failure::poison("no shelf")));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    inbox.accept_all(ids.iter().map(|id| record(id))).await.unwrap();
    inbox.drain().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_on_a_message_whose_id_is_a_space_changes_no_other_message() {
    let scene = Scene::new().await;
    poison(&scene, &[" ", "m1", "m2"]).await;
    let served = Served::on(&scene).await;
    let links = links(&served.address, "/poisoned").await;
    let query = links.iter().find(|link| link.starts_with("verb=discard") && link.contains("message=%20&"));
    let query = query.expect("a link of the message whose id is a space");
    let sent = send(&served.address, &form(&served.address, query).await).await;
    assert!(sent.header("location").unwrap().ends_with("&result=discard-1"), "{sent:?}");
    assert_eq!(scene.count("inbox_status WHERE state = 'discarded' AND message_id = ' '").await, 1);
    assert_eq!(scene.count("inbox_poisoned").await, 2);
    // Its page can be opened too.
    assert_eq!(served.get("/message?message=%20", &[]).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_matches_only_after_the_preview_is_not_discarded_replayed_or_deleted() {
    let scene = Scene::new().await;
    poison(&scene, &["m1", "m2"]).await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("mail")).build().unwrap();
    inbox.accept_or_quarantine([Record::new("orders").with_payload("one")]).await.unwrap();
    let served = Served::on(&scene).await;
    let discard = form(&served.address, "verb=discard&handler=stock").await;
    let delete = form(&served.address, "verb=delete").await;

    poison(&scene, &["m3"]).await;
    inbox.accept_or_quarantine([Record::new("orders").with_payload("two")]).await.unwrap();

    let page = ended(&served.address, &send(&served.address, &discard).await).await;
    assert_eq!(page, "finished: 2 discarded");
    assert_eq!(scene.count("inbox_poisoned WHERE message_id = 'm3'").await, 1);
    let page = ended(&served.address, &send(&served.address, &delete).await).await;
    assert_eq!(page, "finished: 1 deleted");
    assert_eq!(scene.count("inbox_quarantine").await, 1);

    // The same holds for a replay: it ends after the previewed delivery, although `m4` matches by then.
    let replay = form(&served.address, "verb=replay&handler=stock").await;
    poison(&scene, &["m4"]).await;
    let mended = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    let running = mended.start().await.unwrap();
    let page = ended(&served.address, &send(&served.address, &replay).await).await;
    assert_eq!(page, "finished: 1 replayed, none failed again");
    assert_eq!(scene.count("inbox_poisoned WHERE message_id = 'm4'").await, 1);
    running.shutdown(std::time::Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_on_a_message_that_has_changed_shows_its_preview_again() {
    let scene = Scene::new().await;
    poison(&scene, &["m1"]).await;
    let served = Served::on(&scene).await;
    let discard = form(&served.address, "verb=discard&message=m1&handler=stock").await;
    // Another person replays the message, and it fails again.
    let of = wharf::operate::DeliveryFilter::default().message_id("m1");
    assert_eq!(scene.store.operate().acting_as("bob").replay(&of, 1).await.unwrap(), 1);
    poison(&scene, &[]).await;

    let sent = send(&served.address, &discard).await;
    let preview = sent.header("location").unwrap();
    assert!(preview.starts_with("/act?verb=discard&") && preview.contains("message=m1"), "{preview}");
    assert!(served.get(preview, &[]).await.body.contains("no longer what the preview showed"));
    assert_eq!(scene.count("inbox_poisoned").await, 1);
    let again = form(&served.address, preview.trim_start_matches("/act?")).await;
    assert!(send(&served.address, &again).await.header("location").unwrap().ends_with("&result=discard-1"));
}

// Errors of words only have no common fingerprint, and a page shows at most a thousand groups.
#[tokio::test(flavor = "multi_thread")]
async fn a_total_and_an_action_cover_more_errors_than_there_are_groups() {
    let scene = Scene::new().await;
    let word = |id: &str| id.bytes().map(|digit| char::from(digit - b'0' + b'a')).collect::<String>();
    let broken = Runs::new().answering("stock", move |message| Err(Failure::poison(word(message.id()))));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    inbox.accept_all((1_000..2_200).map(|number| record(&number.to_string()))).await.unwrap();
    inbox.drain().await.unwrap();
    let served = Served::on(&scene).await;
    for (page, total) in [
        ("/poisoned", "<strong>1,200</strong> match"),
        ("/deliveries?state=poisoned", "<strong>1,200</strong> match"),
        ("/act?verb=discard&handler=stock", "1,200 deliveries"),
    ] {
        let shown = served.get(page, &[]).await.body;
        assert!(shown.contains(total), "{page}");
    }
    let discard = form(&served.address, "verb=discard&handler=stock").await;
    assert_eq!(ended(&served.address, &send(&served.address, &discard).await).await, "finished: 1,200 discarded");
}

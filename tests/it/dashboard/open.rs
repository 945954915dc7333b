//! Actions on pending and running deliveries of many messages, by group or by filter. They leave out deliveries that
//! changed after the preview.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use wharf::{Failure, Inbox, Record, Registration};

use super::forms::{ended, form, links, post, send};
use super::served::Served;
use crate::conformance::sqlite;
use crate::scene::{self, Database, Runs, Stage, quick, record};

/// A handler that always fails. Its deliveries are not due again during the test, except that `bb` is due once more.
fn failing<D: Database>() -> Registration<D::Backend> {
    Runs::new().answering("stock", move |message| {
        let is_again = message.id() == "bb" && message.attempt() == 1;
        let wait = if is_again { Duration::ZERO } else { Duration::from_secs(3_600) };
        Err(Failure::retry_after(wait, format!("no shelf for article {}", message.id().len())))
    })
}

/// Accepts records and runs all due deliveries once.
async fn fail<D: Database>(inbox: &Inbox<D::Backend>, ids: &[&str]) {
    inbox.accept_all(ids.iter().map(|id| record(id))).await.unwrap();
    inbox.run_due().await.unwrap();
}

fn mail(id: &str) -> Record {
    Record::new("mails").with_id(id.to_owned())
}

async fn groups_of_pending_deliveries<D: Database>() {
    let scene = Stage::<D>::new().await;
    let stock = scene.inbox().subscribe("orders", failing::<D>()).build().unwrap();
    fail::<D>(&stock, &["a", "bb", "ccc"]).await;
    // These deliveries never run.
    let mails = scene.inbox().subscribe("mails", Runs::new().handler("mail")).build().unwrap();
    mails.accept_all([mail("d"), mail("e")]).await.unwrap();
    let served = Served::on(&scene).await;
    let address = served.address.as_str();

    let shown = links(address, "/deliveries").await;
    let group = |handler: &str| {
        let of = format!("handler={handler}&fingerprint=");
        shown
            .iter()
            .find(|link| link.starts_with("verb=discard&state=pending&") && link.contains(&of))
            .expect("a group")
    };
    assert!(group("mail").ends_with("fingerprint=none"), "{shown:?}");
    let discard = form(address, group("stock")).await;
    assert!(discard.contains("expected=3"), "{discard}");
    // After the preview, `bb` fails again, and `dddd` matches too.
    fail::<D>(&stock, &["dddd"]).await;
    let foreign = post(address, "/act", "http://evil.example", &discard).await;
    assert_eq!(foreign.status, 403, "{}", foreign.body);
    assert_eq!(ended(address, &send(address, &format!("{discard}&because=sold")).await).await, "finished: 2 discarded");
    let states = ["a stock discarded", "bb stock pending", "ccc stock discarded", "d mail pending"];
    assert_eq!(scene.states().await, [&states[..], &["dddd stock pending", "e mail pending"]].concat());
    let audited = "inbox_audit WHERE action = 'discard' AND actor = 'alice' AND because = 'sold' AND affected = 2";
    assert_eq!(scene.count(audited).await, 1);
    assert_eq!(scene.count("inbox_history").await, 2, "the former states are kept");

    // `f` matches too, but arrives after the preview.
    let all = form(address, "verb=discard&state=pending&topic=mails").await;
    mails.accept(mail("f")).await.unwrap();
    assert_eq!(ended(address, &send(address, &all).await).await, "finished: 2 discarded");
    assert_eq!(scene.count("inbox_status WHERE state = 'pending' AND message_id = 'f'").await, 1);
    // Without a preview, the action applies to what matches at the time of the request.
    let now = "verb=discard&target=state%3Dpending%26handler%3Dmail";
    assert_eq!(ended(address, &send(address, now).await).await, "finished: 1 discarded");
    // Many pending deliveries can only be discarded, and done ones cannot be changed.
    for wrong in ["verb=replay&state=pending", "verb=release&state=pending", "verb=discard&state=done"] {
        assert_eq!(served.get(&format!("/act?{wrong}"), &[]).await.status, 400, "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pending_deliveries_of_a_group_are_discarded_as_the_preview_showed_them_on_postgres() {
    groups_of_pending_deliveries::<scene::Data>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pending_deliveries_of_a_group_are_discarded_as_the_preview_showed_them_on_sqlite() {
    groups_of_pending_deliveries::<sqlite::scene::Data>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_claims_of_a_group_of_stuck_runs_are_released_and_those_of_later_runs_are_not() {
    let scene = scene::Scene::new().await;
    let (runs, gate) = (Runs::new(), Arc::new(Semaphore::new(0)));
    // No claim expires during the test.
    let limits = quick().lease(Duration::from_secs(600));
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.held("stock", &gate).concurrency(8));
    let inbox = inbox.build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(["a", "b"].map(record)).await.unwrap();
    runs.reached(2).await;
    scene.until("SELECT (count(*) = 2)::int::bigint FROM inbox_status WHERE state = 'running'").await;
    let served = Served::on(&scene).await;
    let address = served.address.as_str();

    let shown = links(address, "/deliveries?state=running").await;
    let release = form(address, shown.iter().find(|link| link.contains("fingerprint=none")).expect("a group")).await;
    inbox.accept(record("c")).await.unwrap();
    runs.reached(3).await;
    scene.until("SELECT (count(*) = 3)::int::bigint FROM inbox_status WHERE state = 'running'").await;
    assert_eq!(ended(address, &send(address, &release).await).await, "finished: 2 released");
    assert_eq!(scene.count("inbox_audit WHERE action = 'release' AND actor = 'alice'").await, 2);
    assert_eq!(scene.count("inbox_status WHERE message_id = 'c' AND state = 'running' AND attempts = 1").await, 1);
    // The released ones run again.
    runs.reached(5).await;
    // Sent again, the form of the same preview finds other runs and leaves them alone.
    assert_eq!(ended(address, &send(address, &release).await).await, "finished: nothing matched any more");
    drop(running);
}

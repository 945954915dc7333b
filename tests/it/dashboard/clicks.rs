//! A person uses the dashboard: without scripts, with the keyboard, with a stop button.

use std::time::Duration;

use wharf::{Failure, Registration};

use super::picture;
use super::served::Served;
use crate::scene::{Db, Runs, Scene, records, within};
use support::browser::{Browser, Look, Scripts};

/// Stores this many poisoned deliveries, as a bad deploy of a handler would leave them.
async fn poisoned(scene: &Scene, count: usize) {
    let broken: Registration<Db> = Runs::new().answering("stock", |_| Err(Failure::poison("no shelf for article 17")));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    inbox.accept_all(records(count)).await.unwrap();
    inbox.drain().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clicks_replay_failed_deliveries_even_without_scripts() {
    let scene = Scene::new().await;
    poisoned(&scene, 3).await;
    let mended = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    let running = mended.start().await.unwrap();
    let (served, browser) = (Served::on(&scene).await, Browser::start(Scripts::Off).await);

    browser.go(&served.url("/")).await;
    let shown = browser.until("no shelf for article 17").await;
    assert!(shown.contains("not live"), "scripts are not disabled:\n{shown}");
    browser.click("Replay…").await;
    browser.click("Replay 3").await;
    // Without scripts, the page reloads itself.
    browser.until("finished: 3 replayed, none failed again").await;
    browser.click("Start").await;
    browser.until("No problems.").await;
    assert_eq!(
        scene.count("inbox_audit WHERE action = 'replay' AND actor = 'alice'").await,
        2,
        "a canary of one delivery, then the rest"
    );

    // Payload, key and header values are shown only on request.
    browser.go(&served.url("/deliveries")).await;
    browser.click("m000002").await;
    let story = browser.until("attempt 2: done").await;
    assert!(!story.contains("payload of m000002"), "{story}");
    browser.click("Show payload").await;
    browser.until("payload of m000002").await;
    served.assert_quiet(&browser).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_canary_is_stopped_by_its_button() {
    let scene = Scene::new().await;
    poisoned(&scene, 3).await;
    let (served, browser) = (Served::on(&scene).await, Browser::start(Scripts::On).await);
    browser.go(&served.url("/poisoned?handler=stock")).await;
    for (look, name) in [(Look::Light, "poisoned"), (Look::Phone, "poisoned-phone")] {
        browser.show(look).await;
        browser.picture(&picture(name)).await;
    }
    browser.show(Look::Light).await;
    browser.click("Replay all that match…").await;
    browser.click("Replay 3").await;
    // No process runs the handler, so the first step waits.
    browser.until("Not run yet").await;
    browser.click("Stop").await;
    browser.until("stopped: by a visitor").await;
    assert_eq!(scene.count("inbox_poisoned").await, 2);
    // The page shows how many are left, and updates itself again.
    let badge = browser.ask("return document.querySelector('#menu a[href$=\"/poisoned\"] .badge').textContent").await;
    assert_eq!(badge, "2");
    let is_live = "return document.querySelector('[data-live-state]').classList.contains('on')";
    within(async { while browser.ask(is_live).await != true {} }).await;
    browser.go(&served.url("/jobs")).await;
    browser.until("stopped: by a visitor").await;

    // The delivery that was replayed is pending, and is discarded with all pending ones.
    for (look, name) in [(Look::Phone, "deliveries-phone"), (Look::Light, "deliveries")] {
        browser.show(look).await;
        browser.go(&served.url("/deliveries")).await;
        browser.picture(&picture(name)).await;
    }
    browser.go(&served.url("/deliveries?state=pending")).await;
    browser.click("Discard all that match…").await;
    browser.click("Discard 1").await;
    browser.until("finished: 1 discarded").await;
    served.assert_quiet(&browser).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_updates_itself_and_is_accessible() {
    let scene = Scene::new().await;
    poisoned(&scene, 1).await;
    let (served, browser) = (Served::on(&scene).await, Browser::start(Scripts::On).await);
    browser.go(&served.url("/")).await;
    browser.until("1 poisoned delivery of stock").await;

    // The page changes without a click when another person acts.
    scene.store.operate().acting_as("bob").pause("stock").await.unwrap();
    browser.until("stock is paused").await;
    scene.store.operate().acting_as("bob").resume("stock").await.unwrap();
    scene.store.operate().acting_as("bob").open_breaker("stock").await.unwrap();
    browser.until("breaker open").await;
    browser.click("Close it…").await;
    browser.click_on("button.primary").await;
    browser.until("Closed: its deliveries are claimed again").await;

    browser.go(&served.url("/")).await;
    browser.until("1 poisoned delivery of stock").await;
    // The first tab stop skips the menu, every plot and input has a label, and every table has headers.
    browser.press('\u{e004}').await;
    let focused = browser.ask("return document.activeElement.textContent").await;
    assert_eq!(focused, "Skip to the content");
    let unnamed = browser
        .ask(
            "return [...document.querySelectorAll('svg[role=img]:not([aria-label]), input:not([type=hidden])')]
                  .filter(found => !found.closest('label')).length",
        )
        .await;
    assert_eq!(unnamed, 0);
    let landmarks = browser
        .ask("return ['header', 'nav', 'main', 'footer'].map(name => document.querySelectorAll(name).length)")
        .await;
    assert_eq!(landmarks, serde_json::json!([1, 1, 1, 1]));
    let headless =
        browser.ask("return [...document.querySelectorAll('table')].filter(table => !table.tHead).length").await;
    assert_eq!(headless, 0);
    served.assert_quiet(&browser).await;
}

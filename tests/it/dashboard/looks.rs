//! The dashboard works with the keyboard, on a phone, in the dark scheme and with a screen reader.

use wharf::{Failure, Registration};

use super::served::Served;
use crate::scene::{Db, Runs, Scene, records, within};
use support::browser::{Browser, Look, Scripts};

const TAB: char = '\u{e004}';
const ENTER: char = '\u{e007}';
/// More tab stops than any page has.
const STOPS_MAX: usize = 100;

async fn poisoned(scene: &Scene, count: usize) {
    let broken: Registration<Db> = Runs::new().answering("stock", |_| Err(Failure::poison("no shelf for article 17")));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    inbox.accept_all(records(count)).await.unwrap();
    inbox.drain().await.unwrap();
}

async fn focused(browser: &Browser) -> String {
    let text = browser.ask("return document.activeElement.textContent.trim()").await;
    text.as_str().unwrap_or_default().to_owned()
}

/// Presses Tab until the text of the focused link or button begins with `name`, then Enter.
async fn press(browser: &Browser, name: &str) {
    for _ in 0..STOPS_MAX {
        browser.press(TAB).await;
        if focused(browser).await.starts_with(name) {
            return browser.press(ENTER).await;
        }
    }
    panic!("the keyboard does not reach {name:?}:\n{}", browser.text().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_is_started_watched_and_stopped_with_the_keyboard_alone() {
    let scene = Scene::new().await;
    poisoned(&scene, 20).await;
    let (served, browser) = (Served::on(&scene).await, Browser::start(Scripts::On).await);
    browser.go(&served.url("/")).await;
    browser.until("no shelf for article 17").await;
    press(&browser, "Replay…").await;
    browser.until("With a canary").await;
    press(&browser, "Replay 20").await;
    browser.until("Not run yet").await;
    for _ in 0..STOPS_MAX {
        if focused(&browser).await == "Stop" {
            break;
        }
        browser.press(TAB).await;
    }

    // The first step ends, so the figures are replaced. The focus stays on the button, and a screen reader reads only
    // the state.
    let first = scene.database.query_texts("SELECT message_id FROM inbox_status WHERE state = 'pending'").await;
    let first = wharf::operate::DeliveryFilter::default().message_id(&first[0]);
    assert_eq!(scene.store.operate().acting_as("bob").discard(&first, 1).await.unwrap(), 1);
    browser.until("11 of 20").await;
    assert_eq!(focused(&browser).await, "Stop");
    let spoken = browser.ask("return [...document.querySelectorAll('[aria-live], [role=status]')].map(one => one.id)");
    assert_eq!(spoken.await, serde_json::json!(["status"]));
    browser.press(ENTER).await;
    browser.until("stopped: by a visitor").await;
    assert_eq!(scene.count("inbox_poisoned").await, 9);
    served.assert_quiet(&browser).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_fit_a_phone_have_dark_colours_and_keep_the_roles_of_their_tables() {
    let scene = Scene::new().await;
    poisoned(&scene, 2).await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("mail")).build().unwrap();
    inbox.accept_or_quarantine([wharf::Record::new("orders").with_payload("no id")]).await.unwrap();
    scene.store.operate().acting_as("alice").pause("stock").await.unwrap();
    let (served, browser) = (Served::on(&scene).await, Browser::start(Scripts::On).await);
    let pages = [
        "/",
        "/poisoned",
        "/quarantine",
        "/quarantine/record?id=1&payload=show",
        "/deliveries",
        "/message?message=m000000&payload=show",
        "/kafka",
        "/processes",
        "/audit",
        "/jobs",
        "/act?verb=replay&handler=stock",
    ];
    for path in pages {
        browser.show(Look::Phone).await;
        browser.go(&served.url(path)).await;
        let fits = browser.ask("return document.documentElement.scrollWidth <= window.innerWidth").await;
        assert_eq!(fits, true, "{path} is wider than a phone");
        // On a phone, rows are displayed as cards. Without explicit roles, a screen reader would not find the table.
        let bare = "return [...document.querySelectorAll('table, thead, tbody, tr, th, td')]
                        .filter(one => !one.hasAttribute('role')).map(one => one.outerHTML)";
        assert_eq!(browser.ask(bare).await, serde_json::json!([]), "{path}");
        let ground = "return getComputedStyle(document.documentElement).backgroundColor";
        browser.show(Look::Light).await;
        let light = browser.ask(ground).await;
        browser.show(Look::Dark).await;
        within(async { while browser.ask(ground).await == light {} }).await;
        assert_eq!(browser.ask(ground).await, "rgb(19, 22, 25)", "{path}");
    }
    served.assert_quiet(&browser).await;
}

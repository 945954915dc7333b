//! Texts from records, errors and people are shown as text, whatever they contain.

use wharf::{Failure, Record};

use super::served::Served;
use crate::scene::{Runs, Scene};
use support::browser::{Browser, Scripts};
use support::postgres::connect;

/// Unescaped, it would end its HTML element, run scripts, load a picture from another server, and reverse the text.
const HOSTILE: &str =
    "\"'><script>window.hacked=1</script><img src=http://evil.example/x onerror=window.hacked=1>{{7*7}}\u{202e}txt";

/// Writes hostile texts into the fields that Kafka and other processes fill.
async fn plant(scene: &Scene) {
    let sql = "UPDATE inbox_processor SET name = $1, version = $1;
               INSERT INTO inbox_processor (name, version, handler_ids, alive_until) VALUES ($1, $1, '{}', now() + interval '1 hour');
               UPDATE inbox_quarantine SET detail = $1, topic = $1;
               INSERT INTO inbox_ledger (consumer_group, topic, kafka_partition, next_offset, stopped_at, stopped_why)
               VALUES ($1, $1, 0, 1, now(), $1)";
    let database = connect(&scene.database.url()).await;
    for statement in sql.split(';') {
        database.execute(statement, &[&HOSTILE]).await.unwrap();
    }
}

/// Asserts that the page shows the hostile text as text, and that no script in it has run.
async fn harmless(browser: &Browser, path: &str) {
    let shown = browser.until("<script>").await;
    assert!(!shown.contains('\u{202e}'), "{path}:\n{shown}");
    // Errors, which the start page shows, are stored without U+202E. All other texts show it escaped.
    assert!(path == "/" || shown.contains("\\u{202e}"), "{path}:\n{shown}");
    let is_harmless = "return window.hacked === undefined && document.images.length === 0";
    assert_eq!(browser.ask(is_harmless).await, true, "{path}");
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_ids_errors_headers_payloads_and_reasons_are_shown_harmlessly() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let broken = runs.answering("stock", |_| Err(Failure::poison(HOSTILE)));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    let hostile = || Record::new("orders").with_source(HOSTILE).with_header(HOSTILE, HOSTILE).with_payload(HOSTILE);
    inbox.accept(hostile().with_id(HOSTILE)).await.unwrap();
    inbox
        .accept(hostile().with_id("json").with_payload(serde_json::json!({ HOSTILE: HOSTILE }).to_string()))
        .await
        .unwrap();
    inbox.accept_or_quarantine([hostile().with_key(HOSTILE)]).await.unwrap();
    inbox.drain().await.unwrap();
    scene.store.operate().acting_as(HOSTILE).because(HOSTILE).pause("stock").await.unwrap();
    let (served, browser) = (Served::on(&scene).await, Browser::start(Scripts::On).await);
    plant(&scene).await;

    let pages = ["/", "/poisoned", "/deliveries", "/audit", "/quarantine", "/quarantine/record?id=1&payload=show"];
    for path in pages.into_iter().chain(["/kafka", "/processes"]) {
        browser.go(&served.url(path)).await;
        harmless(&browser, path).await;
    }
    // An action finds the message by its exact id.
    browser.go(&served.url("/poisoned")).await;
    browser.click_on(".list th a").await;
    browser.click("Show payload").await;
    browser.until("Hide the payload").await;
    browser.click("Replay…").await;
    browser.write("[name=because]", "<b>bold</b>").await;
    browser.click_on("button.primary").await;
    browser.until("One delivery was replayed").await;
    let replayed =
        scene.count("inbox_status WHERE replays = 1 AND state = 'pending' AND message_id LIKE '%hacked%'").await;
    assert_eq!(replayed, 1);

    // The list of actions shows the reason and the filter of a replay of many, which no process runs.
    browser.go(&served.url("/act?verb=replay&error=%3Cscript%3E&handler=stock")).await;
    browser.write("[name=because]", HOSTILE).await;
    browser.click_on("button.primary").await;
    browser.until("Not run yet").await;
    browser.click("Stop").await;
    browser.until("stopped: by a visitor").await;
    browser.go(&served.url("/jobs")).await;
    harmless(&browser, "/jobs").await;

    // Parameters of the URL are shown as text too.
    browser.go(&served.url("/poisoned?error=%22%3E%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E&handler=stock")).await;
    browser.until("No poisoned delivery matches").await;
    browser.go(&served.url("/message?message=%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E")).await;
    browser.until("no delivery of a message").await;
    assert_eq!(browser.ask("return window.hacked === undefined").await, true);
    let complaints: Vec<String> = browser.complaints().await;
    // The browser logs only that the last page is a 404, as expected.
    assert!(complaints.iter().all(|complaint| complaint.contains("404")), "{complaints:?}");
    assert!(browser.requested().await.iter().all(|url| !url.contains("evil.example/x")));
}

//! What came from records, errors and people is shown as text, whatever it is.

use wharf::{Failure, Record};

use super::served::Served;
use crate::scene::{Runs, Scene};
use support::browser::{Browser, Scripts};

/// Would run a script, load a picture from elsewhere, leave its place in the page, and turn the text around.
const HOSTILE: &str =
    "\"'><script>window.hacked=1</script><img src=http://evil.example/x onerror=window.hacked=1>{{7*7}}\u{202e}txt";

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

    for path in ["/", "/poisoned", "/deliveries", "/audit", "/quarantine/record?id=1&payload=show"] {
        browser.go(&served.url(path)).await;
        let shown = browser.until("<script>").await;
        assert!(!shown.contains('\u{202e}'), "{path}:\n{shown}");
        // Errors lost it when they were stored; everything else shows what it is.
        assert!(path == "/" || shown.contains("\\u{202e}"), "{path}:\n{shown}");
        assert_eq!(
            browser.ask("return window.hacked === undefined && document.images.length === 0").await,
            true,
            "{path}"
        );
    }
    // An act finds exactly this message by its id, byte for byte.
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

    // What a visitor puts into the URL is shown as text too.
    browser.go(&served.url("/poisoned?error=%22%3E%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E&handler=stock")).await;
    browser.until("Nothing that is poisoned matches").await;
    browser.go(&served.url("/message?message=%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E")).await;
    browser.until("there is no delivery of a message").await;
    assert_eq!(browser.ask("return window.hacked === undefined").await, true);
    let complaints: Vec<String> = browser.complaints().await;
    // Only that the last page is a 404, which it is.
    assert!(complaints.iter().all(|complaint| complaint.contains("404")), "{complaints:?}");
    assert!(browser.requested().await.iter().all(|url| !url.contains("evil.example/x")));
}

//! The quickstart with its dashboard: the first page names the failing handler and its error, two clicks replay the
//! delivery, and the page of the message lists every attempt.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::picture;
use crate::scene::within;
use support::browser::{Browser, Look, Scripts};
use support::child::example;

#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_of_the_quickstart_names_the_error_and_two_clicks_replay_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(example("quickstart"));
    command.arg("--dashboard").current_dir(folder.path()).kill_on_drop(true).stdout(Stdio::piped());
    let mut process = command.spawn().expect("the example starts");
    let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines();
    let url = within(async {
        loop {
            let line = lines.next_line().await.expect("its output").expect("it prints where the dashboard is");
            if let Some(url) = line.split(' ').find(|word| word.starts_with("http://")) {
                return url.to_owned();
            }
        }
    })
    .await;

    let browser = Browser::start(Scripts::On).await;
    browser.go(&url).await;
    let shown = browser.until("the fraud service does not know mallory").await;
    assert!(shown.contains("fraud.check"), "{shown}");
    for (look, name) in [(Look::Light, "quickstart-start"), (Look::Dark, "quickstart-start-dark")] {
        browser.show(look).await;
        browser.picture(&picture(name)).await;
    }
    browser.show(Look::Light).await;

    browser.click("Replay…").await;
    browser.click("Replay 1").await;
    browser.until("finished: 1 replayed, none failed again").await;

    browser.go(&format!("{url}deliveries?handler=fraud.check&message=order-3")).await;
    browser.click("order-3").await;
    let story = browser.until("attempt 5: done").await;
    for word in ["attempt 1: failed", "the fraud service does not know mallory", "replay you"] {
        assert!(story.contains(word), "{word} is not in\n{story}");
    }
    browser.picture(&picture("quickstart-story")).await;
    assert_eq!(browser.complaints().await, [""; 0]);
}

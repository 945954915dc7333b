//! Whatever text a handler's error contains, the outcome is recorded, and the kept text is bounded and harmless.

use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use wharf::{Failure, Message, Raw, RetryPolicy, handler};

use super::scene::{Runs, Scene, State, key, record};
use support::events::Events;

fn hostile_texts() -> Vec<String> {
    vec![
        "nul \0 inside".to_owned(),
        "\0".to_owned(),
        String::new(),
        "\u{1b}[2J\u{1b}]0;title\u{7}\u{9b}31m".to_owned(),
        "\u{ffff}\u{fffe}\u{10ffff}".to_owned(),
        "\u{202e}txt.exe\u{2066}\u{200f}".to_owned(),
        "{\"a\": \"\\u0000\", \"b\": \"\\ud800\"}".to_owned(),
        "{},NULL,\"".to_owned(),
        "'; DROP TABLE inbox_message; --".to_owned(),
        "é".repeat(1 << 20),
        "\r\n".repeat(100_000),
        "𐍈".repeat(300_000),
    ]
}

/// One record per text; the handler finds its text by the record's id.
async fn outcome_of_each(texts: Vec<String>, retry: RetryPolicy, answer: fn(String) -> Result<(), Failure>) -> Scene {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let records: Vec<_> = (0..texts.len()).map(|number| record(&number.to_string())).collect();
    let failing = runs.answering("stock", move |message| answer(texts[message.id().parse::<usize>().unwrap()].clone()));
    let inbox = scene.inbox().subscribe("orders", failing.retry(retry)).build().unwrap();
    inbox.accept_all(records).await.unwrap();
    inbox.drain().await.unwrap();
    scene
}

/// The kept text has at most 2,000 characters and a mark, without control characters and bidirectional overrides.
async fn assert_kept_text_is_harmless(scene: &Scene) {
    let rows = scene.database.query_texts("SELECT concat(last_error, reason) FROM inbox_delivery").await;
    for text in rows {
        assert!(text.chars().count() <= 2_020, "{} characters", text.chars().count());
        let is_harmless =
            |c: char| matches!(c, '\n' | '\t') || !(c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
        assert!(text.chars().all(is_harmless), "{:?}", text.chars().find(|c| !is_harmless(*c)));
    }
    // The views show the texts too.
    let shown = "SELECT concat(message_id, source, topic, handler_key, reason, last_error) AS v FROM";
    scene.count(&format!("({shown} inbox_poisoned UNION ALL {shown} inbox_status) t WHERE v <> ''")).await;
}

// If a NUL or other unusual text in an error prevented the outcome from being recorded, the delivery would be retried
// forever.
#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_is_recorded_with_any_error_text() {
    let texts = hostile_texts();
    let count = i64::try_from(texts.len()).unwrap();
    for (answer, state) in [
        ((|text| Err(Failure::retry(text))) as fn(String) -> Result<(), Failure>, State::Poisoned),
        (|text| Err(Failure::poison(text)), State::Poisoned),
        (|text| Err(Failure::discard(text)), State::Discarded),
        (|text| std::panic::panic_any(text), State::Poisoned),
    ] {
        let scene = outcome_of_each(texts.clone(), RetryPolicy::never(), answer).await;

        assert_eq!(scene.count_in(state).await, count);
        assert_kept_text_is_harmless(&scene).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_error_is_recorded_with_any_text() {
    let texts = hostile_texts();
    let count = i64::try_from(texts.len()).unwrap();

    let later = |text| Err(Failure::retry_after(Duration::from_secs(3_600), text));
    let scene = outcome_of_each(texts, RetryPolicy::exponential(), later).await;

    let waiting = "finished_at IS NULL AND errors = 1 AND locked_until IS NULL AND due_at > now() AND last_error IS NOT NULL";
    assert_eq!(scene.count(&format!("inbox_delivery WHERE {waiting}")).await, count);
    assert_kept_text_is_harmless(&scene).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_is_recorded_for_errors_of_any_characters() {
    let mut runner = TestRunner::deterministic();
    let text = prop::collection::vec(any::<char>(), 0..60).prop_map(String::from_iter);
    let texts: Vec<String> = (0..300).map(|_| text.new_tree(&mut runner).unwrap().current()).collect();

    let scene = outcome_of_each(texts, RetryPolicy::never(), |text| Err(Failure::poison(text))).await;

    assert_eq!(scene.count_in(State::Poisoned).await, 300);
    assert_kept_text_is_harmless(&scene).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_error_does_not_delay_the_outcomes_beside_it() {
    let scene = Scene::new().await;
    let everyone_is_here = std::sync::Arc::new(tokio::sync::Barrier::new(16));
    // All sixteen return at the same time, so that their outcomes are written in one batch.
    let stock = handler(key("stock"), move |message: Message<Raw>| {
        let barrier = std::sync::Arc::clone(&everyone_is_here);
        async move {
            barrier.wait().await;
            if message.id() == "7" { Err(Failure::retry("\0".repeat(1 << 20))) } else { Ok(()) }
        }
    });
    let inbox = scene.inbox().subscribe("orders", stock.concurrency(16).retry(RetryPolicy::never())).build().unwrap();
    inbox.accept_all((0..16).map(|number| record(&number.to_string()))).await.unwrap();

    inbox.run_due().await.unwrap();

    assert_eq!(scene.count_in(State::Done).await, 15);
    assert_eq!(scene.count_in(State::Poisoned).await, 1);
}

// An error may quote personal data. Text that the redactor removes must appear nowhere.
#[tokio::test(flavor = "multi_thread")]
async fn text_that_the_redactor_removes_is_neither_kept_nor_logged() {
    const CARD: &str = "4111111111111111";
    let events = Events::capture();
    let (scene, runs) = (Scene::new().await, Runs::new());
    let leaking = runs.answering("stock", |message| match message.id() {
        "retried" => Err(Failure::retry(format!("card {CARD} was refused"))),
        "poisoned" => Err(Failure::poison(format!("card {CARD} is stolen"))),
        "discarded" => Err(Failure::discard(format!("card {CARD} is a test"))),
        _ => panic!("card {CARD} has no owner"),
    });
    let redact = |error: &str| error.replace(|character: char| character.is_ascii_digit(), "#");
    let inbox = scene.inbox().subscribe("orders", leaking).redact(redact).build().unwrap();
    inbox.accept_all(["retried", "poisoned", "discarded", "panicked"].map(record)).await.unwrap();
    inbox.run_due().await.unwrap();

    let kept = "SELECT coalesce(last_error, reason) FROM inbox_status ORDER BY message_id";
    let hidden = "#".repeat(CARD.len());
    let expected = ["{} is a test", "{} has no owner", "{} is stolen", "{} was refused"].map(|end| end.replace("{}", &hidden));
    for (kept, expected) in scene.database.query_texts(kept).await.iter().zip(expected) {
        assert!(kept.ends_with(&expected), "{kept}");
    }
    assert_eq!(events.matching(|event| format!("{event:?}").contains(CARD)), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redactor_that_panics_hides_everything() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let leaking = runs.answering("stock", |_| Err(Failure::poison("secret")));
    let inbox = scene.inbox().subscribe("orders", leaking).redact(|_| panic!("no")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let kept = scene.database.query_texts("SELECT last_error FROM inbox_poisoned").await;
    assert_eq!(kept, ["(not shown: the redactor panicked)"]);
}

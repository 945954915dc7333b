//! Relays that crash or freeze: another relay takes over, no record is lost or overtaken, and a relay that continues
//! later changes nothing.

use super::post::{Post, end, publish_sql};
use super::sender;
use support::postgres::connect;

/// Waits until this many records are on the topic.
async fn on_topic(post: &Post, count: i64) {
    while post.kafka.watermarks(&post.topic, 0).await.high < count {
        tokio::task::yield_now().await;
    }
}

/// Ends the statements that mark records as sent and wait in the database: the server would complete them although
/// their client is gone.
async fn marks_are_gone(post: &Post) {
    let marks = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'wharf' AND query LIKE '%UPDATE inbox_outbox o%'
                 AND state = 'active'";
    let ended = format!("SELECT (count(pg_terminate_backend(pid)) = 0)::int::bigint {marks}");
    post.scene.until(&ended).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_takes_over_after_a_kill_between_send_and_mark_sends_the_record_again() {
    let post = Post::new(1).await;
    post.publish("k", &["a"]).await;
    let holder = connect(&post.scene.database.url()).await;
    // The mark waits for this lock.
    holder.batch_execute("BEGIN; SELECT FROM inbox_outbox FOR UPDATE").await.unwrap();
    let child = sender::spawn(&post);
    on_topic(&post, 1).await;
    child.kill9().await;
    marks_are_gone(&post).await;
    holder.batch_execute("COMMIT").await.unwrap();
    let relay = post.start();
    post.publish("k", &["b"]).await;
    post.sent().await;
    let read = post.read().await;
    assert_eq!(read.iter().map(|record| record.text()).collect::<Vec<_>>(), ["a", "a", "b"]);
    assert_eq!(read[0].header("ce_id"), read[1].header("ce_id"));
    assert_ne!(read[1].header("ce_id"), read[2].header("ce_id"));
    end(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_frozen_past_its_lease_marks_nothing_when_it_continues() {
    let post = Post::new(1).await;
    post.publish("k", &["a"]).await;
    let holder = connect(&post.scene.database.url()).await;
    holder.batch_execute("BEGIN; SELECT FROM inbox_outbox FOR UPDATE").await.unwrap();
    let child = sender::spawn(&post);
    on_topic(&post, 1).await;
    child.stop();
    // The same happens after a network failure.
    marks_are_gone(&post).await;
    let slept = "SELECT (bool_and(held_until <= now()))::int::bigint FROM inbox_outbox_slots WHERE holder IS NOT NULL";
    post.scene.until(slept).await;
    let relay = post.start();
    on_topic(&post, 2).await;
    holder.batch_execute("COMMIT").await.unwrap();
    post.publish("k", &["b"]).await;
    post.sent().await;
    let marks = "SELECT string_agg(kafka_offset::text, ',' ORDER BY id) FROM inbox_outbox";
    assert_eq!(post.scene.database.query_texts(marks).await, ["1,2"]);

    child.cont();
    child.await_line(|line| line.contains("sending")).await;
    post.scene.until("SELECT (count(*) = 2)::int::bigint FROM inbox_relay WHERE alive_until > now()").await;
    post.publish("k", &["c"]).await;
    post.sent().await;
    assert_eq!(post.payloads().await, ["a", "a", "b", "c"]);
    child.kill9().await;
    end(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relays_share_the_slots_and_take_over_those_of_a_crashed_one() {
    let post = Post::new(4).await;
    let relay = post.start();
    let child = sender::spawn(&post);
    let shared = "SELECT (count(*) = 2 AND min(slots) = 8)::int::bigint
                  FROM (SELECT count(*) AS slots FROM inbox_outbox_slots WHERE holder IS NOT NULL GROUP BY holder) s";
    post.scene.until(shared).await;
    let keys = 40;
    let publish = |from: usize, to: usize| {
        let all: Vec<String> =
            (from..to).map(|n| publish_sql(&post.topic, &format!("key-{}", n % keys), &format!("{n:05}"))).collect();
        all.join(";")
    };
    post.scene.database.execute(&publish(0, 1_000)).await;
    child.kill9().await;
    post.scene.database.execute(&publish(1_000, 2_000)).await;
    post.sent().await;
    let read = post.read().await;
    for number in 0..keys {
        let name = format!("key-{number}");
        let mut of_key: Vec<&str> =
            read.iter().filter(|record| record.key.as_deref() == Some(&name)).map(|record| record.text()).collect();
        // A repeated record comes after its first occurrence.
        let mut seen = std::collections::HashSet::new();
        of_key.retain(|payload| seen.insert(*payload));
        let expected: Vec<String> = (0..2_000).filter(|n| n % keys == number).map(|n| format!("{n:05}")).collect();
        assert_eq!(of_key, expected, "{name}");
    }
    end(relay).await;
}

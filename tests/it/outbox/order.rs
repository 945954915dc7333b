//! Order: records of one key are sent in the order of their commits, also beside long transactions.

use super::post::{Post, end, publish_sql};
use support::postgres::connect;

// The transaction id of the open transaction is lower than ids that were already sent.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_commits_late_delays_no_other_and_is_not_skipped() {
    let post = Post::new(1).await;
    let relay = post.start();
    let late = connect(&post.scene.database.url()).await;
    late.batch_execute(&format!("BEGIN; {}", publish_sql(&post.topic, "late", "late"))).await.unwrap();
    post.publish("other", &["1", "2", "3"]).await;
    post.scene.until("SELECT (count(*) = 3)::int::bigint FROM inbox_outbox WHERE status = 2").await;
    late.batch_execute("COMMIT").await.unwrap();
    post.scene.until("SELECT (count(*) = 4)::int::bigint FROM inbox_outbox WHERE status = 2").await;
    assert_eq!(post.payloads().await, ["1", "2", "3", "late"]);
    end(relay).await;
}

// Two writers lock the same row before they publish. The first has the lower transaction id and is open while records
// of its slot are sent.
#[tokio::test(flavor = "multi_thread")]
async fn writers_that_wait_for_each_other_are_sent_in_the_order_of_their_commits() {
    let post = Post::new(4).await;
    let relay = post.start();
    post.scene
        .database
        .execute("CREATE TABLE account (id int PRIMARY KEY, changes int); INSERT INTO account VALUES (1, 0)")
        .await;
    let url = post.scene.database.url();
    let writers = (0..4).map(|_| {
        let (url, topic) = (url.clone(), post.topic.clone());
        tokio::spawn(async move {
            let client = connect(&url).await;
            for _ in 0..50 {
                let write = format!(
                    "BEGIN; UPDATE account SET changes = changes + 1 WHERE id = 1;
                     SELECT inbox_publish('{topic}', convert_to(changes::text, 'UTF8'), record_key => 'account-1') FROM account; COMMIT"
                );
                client.batch_execute(&write).await.unwrap();
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    post.sent().await;
    let expected: Vec<String> = (1..=200).map(|change| change.to_string()).collect();
    assert_eq!(post.payloads().await, expected);
    end(relay).await;
}

// The transaction of the first record has the newest number when the relay reads, and a lower id than a record that an
// older transaction has just committed to the same slot.
#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_with_the_newest_transaction_keeps_its_place() {
    let post = Post::new(1).await;
    let relay = post.start();
    post.scene.until("SELECT (count(*) = 16)::int::bigint FROM inbox_outbox_slots WHERE holder IS NOT NULL").await;
    let slot = |key: &str| format!("inbox_outbox_slot(convert_to({key}, 'UTF8'))");
    let same_slot = format!(
        "SELECT 'k' || n FROM generate_series(1, 1000) n WHERE {} = {} LIMIT 1",
        slot("'k' || n"),
        slot("'contended'")
    );
    let other = post.scene.database.query_texts(&same_slot).await.remove(0);
    let url = post.scene.database.url();
    let (older, newest) = (connect(&url).await, connect(&url).await);
    older.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
    newest.batch_execute(&format!("BEGIN; {}", publish_sql(&post.topic, "contended", "first"))).await.unwrap();
    let other_record = publish_sql(&post.topic, &other, "other");
    older.batch_execute(&format!("{other_record}; COMMIT")).await.unwrap();
    post.scene.until("SELECT (count(*) = 1)::int::bigint FROM inbox_outbox WHERE status = 2").await;
    post.scene.database.execute(&other_record).await;
    post.scene.until("SELECT (count(*) = 2)::int::bigint FROM inbox_outbox WHERE status = 2").await;

    newest.batch_execute("COMMIT").await.unwrap();
    post.publish("contended", &["second"]).await;

    post.sent().await;
    assert_eq!(post.payloads().await, ["other", "other", "first", "second"]);
    end(relay).await;
}

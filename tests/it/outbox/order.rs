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

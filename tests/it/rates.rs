//! A rate limit across real processes: together they start as many deliveries as the limit allows.

use super::scene::Scene;
use super::worker::{Worker, accept, order};

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_together_start_as_many_as_the_limit_allows() {
    const BURST: i64 = 20;
    let scene = Scene::new().await;
    let worker = Worker { rate_burst: u32::try_from(BURST).unwrap(), ..Worker::on(&scene).await };
    let orders = (0..200).map(|number| order(&format!("m{number:06}"), "work")).collect();
    accept(&scene, &["stock"], orders).await;
    let workers = [worker.spawn(), worker.spawn()];

    for round in 1..=3 {
        scene
            .until(&format!(
                "SELECT (count(*) >= {})::int::bigint FROM inbox_status WHERE state = 'done'",
                BURST * round
            ))
            .await;
        let runs = scene.database.query_one_i64("SELECT count(*) FROM run").await;
        assert_eq!(runs, BURST * round);
        if round < 3 {
            // As if the time for a full burst had passed.
            scene.database.execute("UPDATE inbox_handler SET rate_next_at = NULL").await;
        }
    }

    for worker in workers {
        worker.kill9().await;
    }
    assert_eq!(scene.database.query_one_i64("SELECT count(*) FROM run").await, BURST * 3);
    assert_eq!(scene.count("inbox_delivery WHERE attempts > 0 AND finished_at IS NULL").await, 0);
}

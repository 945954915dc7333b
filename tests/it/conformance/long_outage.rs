//! A long outage: hundreds of probes of an open breaker, one after another.

use super::breaker::{ALL_DUE, FAILURES, IS_OPEN, PROBE_NOW, SLOTS, Service, breaking};
use super::scene::{Runs, Scene, records};

/// Those of forty minutes, one every ten seconds. Those of an hour would take longer than three seconds.
const PROBES: usize = 240;
/// Few, so that each of them probes more often than its failures are kept.
const MESSAGES: usize = 5;
/// The default of `Limits::attempt_rows_max`.
const ATTEMPT_ROWS_MAX: i64 = 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_long_outage_costs_one_run_for_each_probe_and_poisons_nothing() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    let inbox = scene.inbox().subscribe("orders", breaking(service.plain(&runs))).build().unwrap();
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.database.query_one_i64(IS_OPEN).await, 1);
    let opening = runs.count();
    assert!(opening <= usize::try_from(FAILURES).unwrap() + SLOTS, "{opening} runs");

    for probe in 1..=PROBES {
        scene.database.execute(&format!("{PROBE_NOW}; {ALL_DUE}")).await;
        assert_eq!((inbox.drain().await.unwrap(), runs.count()), (1, opening + probe));
    }

    assert_eq!(scene.count("inbox_delivery WHERE finished_at IS NULL AND errors = 0 AND crashes = 0").await, MESSAGES as i64);
    let most = "SELECT max(kept) FROM (SELECT count(*) AS kept FROM inbox_attempt GROUP BY message_seq, handler_id) per_delivery";
    assert_eq!(scene.database.query_one_i64(most).await, ATTEMPT_ROWS_MAX);
    assert_eq!(scene.database.query_one_i64(IS_OPEN).await, 1);
    service.returns();
    scene.database.execute(&format!("{PROBE_NOW}; {ALL_DUE}")).await;
    inbox.drain().await.unwrap();
    assert_eq!((runs.count(), scene.count_done_uncharged().await), (opening + PROBES + MESSAGES, MESSAGES as i64));
}

//! The retention job: messages that were finished long enough ago are counted, deleted and audited, and nothing else is
//! deleted.

use wharf::Record;

use super::scene::{Runs, Scene, record, records};
use crate::cli::program::Program;

#[tokio::test(flavor = "multi_thread")]
async fn only_finished_messages_of_the_given_age_are_deleted() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all(records(25)).await.unwrap();
    inbox.drain().await.unwrap();
    let ago = "now() - interval '40 days'";
    scene
        .database
        .execute(&format!("UPDATE inbox_delivery SET finished_at = {ago}; UPDATE inbox_message SET received_at = {ago}"))
        .await;
    inbox.accept(record("young")).await.unwrap();
    inbox.drain().await.unwrap();
    inbox.accept(record("open")).await.unwrap();
    let program = Program::on(&scene);

    assert_eq!(program.run(&["cleanup", "--older-than", "30d"]).await.code, 2);
    let would = program.json(&["cleanup", "--older-than", "30d", "--dry-run"], 0).await;
    assert_eq!((&would["messages"], &would["deliveries"]), (&25.into(), &25.into()));
    let kept = program.json(&["cleanup", "--older-than", "30d", "--for-handler", "stock=90d", "--dry-run"], 0).await;
    assert_eq!(kept["messages"], 0);
    let unknown = program.run(&["cleanup", "--older-than", "30d", "--for-handler", "stcok=90d", "--yes"]).await;
    assert_eq!(unknown.code, 2, "{unknown:?}");
    assert_eq!(scene.count("inbox_message").await, 27);

    let job = ["cleanup", "--older-than", "30d", "--batch", "10", "--yes", "--because", "nightly", "--actor", "cron"];
    assert!(program.well(&job).await.starts_with("cleanup: 25 messages, 25 deliveries"));
    assert_eq!(program.json(&job, 0).await["messages"], 0);
    assert_eq!(scene.states().await, ["open stock pending", "young stock done"]);
    let audit = "SELECT concat_ws('|', action, affected, actor, because, filter->>'older_than') FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(audit).await, ["purge|25|cron|nightly|30days", "purge|0|cron|nightly|30days"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_counts_the_quarantined_records_that_the_job_would_delete() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    for number in 0..3 {
        inbox.accept_or_quarantine([Record::new("orders").with_payload(number.to_string())]).await.unwrap();
    }
    let past = "now() - interval '40 days'";
    let past = format!("UPDATE inbox_quarantine SET quarantined_at = {past} WHERE id < (SELECT max(id) FROM inbox_quarantine)");
    scene.database.execute(&past).await;
    let program = Program::on(&scene);
    let job = ["cleanup", "--older-than", "30d"];
    assert_eq!(program.json(&[&job[..], &["--dry-run"]].concat(), 0).await["quarantined"], 0);
    assert!(!program.well(&[&job[..], &["--dry-run"]].concat()).await.contains("quarantined"));
    let job = [&job[..], &["--expire-quarantined", "30d"]].concat();
    assert_eq!(program.json(&[&job[..], &["--dry-run"]].concat(), 0).await["quarantined"], 2);
    let would = program.well(&[&job[..], &["--dry-run"]].concat()).await;
    assert!(would.contains("would purge 2 quarantined records with their payloads"), "{would}");
    assert_eq!(scene.count("inbox_quarantine").await, 3);
    assert_eq!(program.json(&[&job[..], &["--yes"]].concat(), 0).await["quarantined"], 2);
}

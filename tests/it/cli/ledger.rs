//! Positions in Kafka, listed and moved without a request to a broker.

use super::scene::Scene;
use crate::cli::program::Program;

/// Two partitions of one topic; the second is stopped.
async fn staged() -> (Scene, Program) {
    let scene = Scene::new().await;
    scene
        .database
        .execute(
            "INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset, leader_epoch, updated_at)
             VALUES ('shop', 'C', 'orders', 0, 5, 3, now()), ('shop', 'C', 'orders', 1, 7, NULL, now());
             UPDATE inbox_ledger SET stopped_at = now(), stopped_why = 'the log was truncated' WHERE kafka_partition = 1",
        )
        .await;
    let program = Program::on(&scene);
    (scene, program)
}

async fn offsets(scene: &Scene) -> Vec<String> {
    let offsets = "SELECT kafka_partition || ': ' || next_offset || CASE WHEN stopped_at IS NULL THEN '' ELSE ' stopped' END
                   FROM inbox_ledger ORDER BY kafka_partition";
    scene.database.query_texts(offsets).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ledger_lists_positions_and_a_stopped_partition_is_a_problem() {
    let (_scene, program) = staged().await;
    let listed = program.json(&["ledger", "list", "--group", "shop"], 1).await;
    assert_eq!((&listed[0]["next_offset"], &listed[1]["stopped_why"]), (&5.into(), &"the log was truncated".into()));
    let shown = program.run(&["ledger", "list"]).await;
    assert!(shown.code == 1 && shown.stdout.contains("orders[1]") && shown.stdout.contains("stopped"), "{shown:?}");
    assert!(program.well(&["ledger", "list", "--topic", "returns"]).await.contains("nothing was read"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_moves_positions_resumes_stopped_partitions_and_is_audited() {
    let (scene, program) = staged().await;
    let orders = ["--group", "shop", "--topic", "orders"];
    let reset = |more: &[&'static str]| [&["ledger", "reset"], &orders[..], more].concat();

    assert_eq!(program.run(&reset(&[])).await.code, 2, "there is no terminal for the confirmation");
    assert_eq!(program.run(&reset(&["--to", "3", "--yes"])).await.code, 2, "an offset belongs to one partition");
    assert_eq!(program.run(&["ledger", "reset", "--group", "shop", "--topic", "x", "--yes"]).await.code, 2, "no such topic");
    let would = program.json(&reset(&["--dry-run"]), 0).await;
    assert_eq!((&would["matching"], &would["changed"]), (&2.into(), &0.into()));
    assert_eq!(offsets(&scene).await, ["0: 5", "1: 7 stopped"]);

    let moved = program.json(&reset(&["--partition", "1", "--to", "4", "--yes", "--because", "restored"]), 0).await;
    assert_eq!(moved["changed"], 1);
    assert_eq!(offsets(&scene).await, ["0: 5", "1: 4"]);
    assert!(program.well(&reset(&["--yes"])).await.contains("changed 2 partitions"));
    assert!(program.well(&["ledger", "list"]).await.contains("beginning"));
    let audit = "SELECT action || ' ' || affected || ' ' || coalesce(because, '-') FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(audit).await, ["reset ledger 1 restored", "reset ledger 2 -"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_skip_leaves_out_records_records_the_gap_and_never_moves_back() {
    let (scene, program) = staged().await;
    let skip = |to: &'static str| {
        ["ledger", "skip", "--group", "shop", "--topic", "orders", "--partition", "1", "--to", to, "--yes"]
    };
    assert_eq!(program.json(&skip("6"), 1).await["changed"], 0, "not ahead of the ledger");
    assert_eq!(program.json(&skip("9"), 0).await["changed"], 1);
    assert_eq!(offsets(&scene).await, ["0: 5", "1: 9"]);
    let gaps = "SELECT kafka_partition || ': ' || from_offset || ' to ' || to_offset FROM inbox_gap";
    assert_eq!(scene.database.query_texts(gaps).await, ["1: 7 to 9"]);
    assert_eq!(scene.count("inbox_audit").await, 2);
}

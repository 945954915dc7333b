//! The audit of the ledger against a real Kafka, with and without problems.

use crate::cli::program::Program;
use crate::kafka::stage::{Stage, end};
use crate::scene::Runs;

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_shows_lag_and_findings() {
    let (stage, runs) = (Stage::new(1).await, Runs::new());
    stage.produce(0, 5).await;
    let running = stage.start(&runs).await;
    runs.reached(5).await;
    end(running).await;
    stage.produce(0, 5).await;
    let program = Program::on(&stage.scene);
    let kafka = ["--brokers", stage.kafka.brokers(), "--group", &stage.group, "--set", "client.id=me"];
    let healthy = program.json(&[&["audit"], &kafka[..]].concat(), 0).await;
    assert_eq!((&healthy["partitions"][0]["lag"], &healthy["is_well"]), (&5.into(), &true.into()));
    assert!(program.well(&[&["audit"], &kafka[..]].concat()).await.contains("no problems found"));
    assert_eq!(program.json(&[&["doctor"], &kafka[..]].concat(), 0).await["audit"]["is_well"], true);

    stage.kafka.commit(&stage.group, &stage.topic, 0, 9).await;
    let found = program.json(&[&["audit"], &kafka[..]].concat(), 1).await;
    assert_eq!(found["findings"][0]["code"], "committed ahead");
    assert!(program.run(&[&["doctor"], &kafka[..]].concat()).await.stdout.contains("another consumer"), "doctor");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mistyped_group_is_a_problem_and_not_an_empty_table() {
    let stage = Stage::new(1).await;
    let program = Program::on(&stage.scene);
    let found = program.json(&["audit", "--brokers", stage.kafka.brokers(), "--group", "shopp"], 1).await;
    assert_eq!((&found["findings"][0]["code"], &found["is_well"]), (&"unknown group".into(), &false.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_shows_the_ledger_when_kafka_does_not_answer() {
    let scene = crate::scene::Scene::new().await;
    scene
        .database
        .execute(
            "INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset)
             VALUES ('shop', 'C', 'orders', 0, 5), ('other', 'C', 'orders', 0, 6);
             UPDATE inbox_ledger SET stopped_at = now(), stopped_why = 'truncated' WHERE consumer_group = 'shop';
             INSERT INTO inbox_ingest (consumer_group, name, cluster_id, problem, problem_since)
             VALUES ('shop', 'host/1', '', 'no broker', now())",
        )
        .await;
    let program = Program::on(&scene);
    let nobody = ["audit", "--brokers", "127.0.0.1:1", "--group", "shop"];
    let (seen, shown) = tokio::join!(program.json(&nobody, 3), program.run(&nobody));
    assert!(seen["kafka_error"].as_str().unwrap().contains("cannot ask Kafka about group shop"), "{seen}");
    assert_eq!((seen["ledger"].as_array().unwrap().len(), &seen["ledger"][0]["next_offset"]), (1, &5.into()), "{seen}");
    assert_eq!((&seen["ingests"][0]["problem"], &seen["is_well"]), (&"no broker".into(), &false.into()));
    assert_eq!(shown.code, 3);
    for part in ["orders[0]", "truncated", "no broker", "cannot ask Kafka about group shop"] {
        assert!(shown.stdout.contains(part), "{part}: {shown:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_shows_database_problems_when_kafka_does_not_answer() {
    let scene = crate::scene::Scene::new().await;
    let program = Program::on(&scene);
    let nobody = ["doctor", "--brokers", "127.0.0.1:1", "--group", "shop"];
    let seen = program.json(&nobody, 3).await;
    assert!(seen["kafka_error"].as_str().unwrap().contains("cannot ask Kafka about group shop"), "{seen}");
    assert!(seen["diagnosis"]["symptoms"].is_array() && seen["is_well"] == false, "{seen}");
    assert!(program.run(&nobody).await.stdout.contains("cannot ask Kafka about group shop"));
}

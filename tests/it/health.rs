//! `running.health()` reports what keeps an inbox from working, without a query to the database or Kafka.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use wharf::health::{Health, HealthReason, Monitor};

use crate::own_server::OwnServer;
use crate::scene::{Runs, Scene, quick, record, within};
use support::child::example;
use support::http;

/// Waits until the health matches.
async fn until(monitor: &Monitor, is_wanted: impl Fn(&Health) -> bool) -> Health {
    within(async {
        loop {
            let health = monitor.health();
            if is_wanted(&health) {
                return health;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_is_not_ready_while_its_database_is_unavailable() {
    let server = OwnServer::start().await;
    let runs = Runs::new();
    let inbox = server.inbox().subscribe("orders", runs.handler("health")).build().unwrap();
    let running = inbox.start().await.unwrap();
    let monitor = running.monitor();
    assert_eq!(running.health().to_string(), "healthy");

    server.cluster.stop_immediate().await;
    let away = until(&monitor, |health| !health.is_ready).await;
    assert!(away.is_live, "{away}");
    assert!(matches!(away.reasons[..], [HealthReason::DatabaseUnavailable { secs: 5.., .. }]), "{away}");

    server.cluster.start_again().await;
    until(&monitor, |health| health.is_ready && !health.is_degraded()).await;
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let ended = monitor.health();
    assert!(ended.is_live && !ended.is_ready, "{ended}");
    assert!(matches!(ended.reasons[..], [HealthReason::Stopping]), "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stuck_handlers_are_reported_as_no_progress_with_the_longest_run() {
    let scene = Scene::new().await;
    let (runs, gate) = (Runs::new(), Arc::new(Semaphore::new(0)));
    let limits = quick().no_progress_after(Duration::from_millis(50));
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.held("stock.reserve", &gate)).build().unwrap();
    let running = inbox.start().await.unwrap();
    let monitor = running.monitor();
    inbox.accept(record("a")).await.unwrap();

    let stuck = until(&monitor, Health::is_degraded).await;
    assert!(stuck.is_live && stuck.is_ready, "{stuck}");
    assert!(
        matches!(&stuck.reasons[..], [HealthReason::NoProgress { handler_key, .. }] if handler_key == "stock.reserve"),
        "{stuck}"
    );

    gate.add_permits(1);
    until(&monitor, |health| !health.is_degraded()).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_answers_both_probes_and_shows_its_metrics() {
    let mut served = Command::new(example("health"))
        .env("HEALTH_LISTEN", "127.0.0.1:0")
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example starts");
    let mut said = String::new();
    BufReader::new(served.stdout.take().unwrap()).read_line(&mut said).unwrap();
    let address = said.trim().strip_prefix("listening on ").expect("it says where it listens").to_owned();
    for path in ["/livez", "/readyz"] {
        let answer = http::request(&address, "GET", path, &[], "").await;
        assert_eq!((answer.status, answer.body.as_str()), (200, "healthy"), "{path}");
    }
    // The metrics that need neither Kafka nor a delivery.
    let shown = http::request(&address, "GET", "/metrics", &[], "").await;
    for name in ["wharf_outcomes_total", "wharf_handler_slots", "wharf_pool_connections"] {
        assert!(shown.status == 200 && shown.body.contains(&format!("# TYPE {name} ")), "{name} in\n{}", shown.body);
    }
    served.kill().unwrap();
    served.wait().unwrap();
}

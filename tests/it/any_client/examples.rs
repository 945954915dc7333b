//! The examples with other PostgreSQL clients run unchanged and book each order once.

use std::process::Command;

use crate::scene::Scene;
use support::child::example;

fn run(name: &str, url: &str) -> String {
    let output = Command::new(example(name)).env("DATABASE_URL", url).output().expect("the example starts");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_with_sqlx_books_each_order_once() {
    let scene = Scene::new().await;
    assert_eq!(run("any_client_sqlx", &scene.database.url()), "booked: order-1, order-2, order-3\n");
    assert_eq!(scene.count_done_uncharged().await, 2);
    assert_eq!(scene.count("inbox_status WHERE state = 'done' AND attempts = 2 AND errors = 1").await, 1);
    // The second run finds nothing to do.
    assert_eq!(run("any_client_sqlx", &scene.database.url()), "booked: order-1, order-2, order-3\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_with_tokio_postgres_books_and_ships_each_order_once() {
    let scene = Scene::new().await;
    let printed = run("any_client_tokio_postgres", &scene.database.url());
    assert_eq!(printed, "booking: order-1, order-2\nshipment: order-1, order-2\n");
    assert_eq!(scene.count_done_at_first().await, 4);
}

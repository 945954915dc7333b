//! The output of the retention job while it waits. Only on PostgreSQL are identities committed before their messages
//! are deleted.

use tokio::io::{AsyncBufReadExt, BufReader};

use crate::cli::program::Program;
use crate::scene::{Runs, Scene, records, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_a_terminal_prints_that_it_waits() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept_all(records(3)).await.unwrap();
    inbox.drain().await.unwrap();
    let ago = "now() - interval '40 days'";
    scene
        .database
        .execute(&format!(
            "UPDATE inbox_delivery SET finished_at = {ago}; UPDATE inbox_message SET received_at = {ago}"
        ))
        .await;
    let mut command = Program::on(&scene).command();
    command.args(["cleanup", "--older-than", "30d", "--keep-identities", "90d", "--yes"]);

    let mut job = command.spawn().unwrap();

    let mut lines = BufReader::new(job.stderr.take().unwrap()).lines();
    let line = within(lines.next_line()).await.unwrap().unwrap();
    assert_eq!(line, "identities are written; their messages are removed in about two minutes");
    assert_eq!(scene.count("inbox_message").await, 3);
    // The job would take two minutes.
    job.kill().await.unwrap();
}

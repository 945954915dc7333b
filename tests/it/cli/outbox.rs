//! The outbox commands: list, show, resend, discard.

use wharf::{Failure, Message, Outbox, Raw, Record, tx_handler, with_state};

use super::scene::{Connection, Db, Scene, key};
use crate::cli::program::Program;

async fn publish(outbox: Outbox<Db>, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
    outbox.publish(conn, Record::new("out").with_id(message.id().to_owned()).json(&serde_json::json!({ "number": 1 }))).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn outbox_records_are_listed_shown_discarded_and_resent() {
    let scene = Scene::new().await;
    let handler = tx_handler(key("stock"), with_state(Outbox::new(&scene.store), publish));
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(["a", "b"].map(super::scene::record)).await.unwrap();
    inbox.drain().await.unwrap();
    let program = Program::on(&scene);

    assert_eq!(program.well(&["outbox", "list"]).await, "none\n");
    let listed = program.json(&["outbox", "list", "--state", "waiting"], 0).await;
    assert_eq!(listed.as_array().unwrap().len(), 2);
    let id = listed[0]["id"].to_string();
    assert!(!program.well(&["outbox", "show", &id]).await.contains("number"));
    assert!(program.well(&["outbox", "show", &id, "--show-payload"]).await.contains("\"number\": 1"));
    assert_eq!(program.run(&["outbox", "show", "999"]).await.code, 1);

    assert_eq!(program.run(&["outbox", "discard", "--yes"]).await.code, 2);
    assert!(program.well(&["outbox", "discard", "--id", &id, "--dry-run"]).await.contains("would discard 1"));
    assert!(program.well(&["outbox", "discard", "--id", &id, "--yes"]).await.contains("discard: 1 records"));
    assert_eq!(program.json(&["outbox", "replay", "--id", &id, "--yes"], 0).await["affected"], 1);
    assert!(program.well(&["outbox", "list", "--state", "waiting"]).await.contains("waiting"));
    // No relay runs.
    let doctor = program.run(&["doctor"]).await;
    assert_eq!(doctor.code, 1);
}

//! The child process that relay tests kill, stop and continue: a relay on the test's database. It prints when it has
//! slots.

use wharf::{Postgres, Store};

use super::post::{Post, relay};
use support::child::{Child, Role, parameter, say};

pub const ROLE: (&str, Role) = ("sender", send);

const URL: &str = "SENDER_URL";
const BROKERS: &str = "SENDER_BROKERS";

pub fn spawn(post: &Post) -> Child {
    Child::spawn(ROLE.0, &[(URL, &post.scene.database.url()), (BROKERS, post.kafka.brokers())])
}

#[tokio::main]
async fn send() {
    let store = Store::<Postgres>::connect(&parameter(URL)).await.unwrap();
    let mut running = relay(&parameter(BROKERS)).start(&store).unwrap();
    say("sending");
    panic!("{}", running.failure().await);
}

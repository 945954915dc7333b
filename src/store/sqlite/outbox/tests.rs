//! Reads beside held topics: in the order of ids, over all other topics, whatever waits for the held ones.

use std::time::{Duration, Instant};

use diesel::{Connection, SqliteConnection};

use super::super::migrate;
use super::{hold, publish, read, register};
use crate::store::outbound::{Hold, NewOutgoing, OutboxQuery};
use crate::types::Headers;

const MINUTE: Duration = Duration::from_secs(60);

fn record(topic: &str) -> NewOutgoing {
    NewOutgoing {
        topic: topic.into(),
        message_id: "id".to_owned(),
        source: "wharf".to_owned(),
        recorded_at: None,
        key: Some("k".into()),
        headers: Headers::default(),
        payload: None,
    }
}

#[test]
fn records_beside_held_topics_are_read_in_order_up_to_the_limit() {
    let mut conn = SqliteConnection::establish(":memory:").unwrap();
    migrate::migrate(&mut conn).unwrap();
    let records = ["denied", "b", "a", "denied", "b", "c", "unknown", "a"].map(record);
    let ids = publish(&mut conn, &records).unwrap();
    let relay = register(&mut conn, "relay", MINUTE).unwrap();
    let holding = Hold { relay, name: "relay".into(), lease: MINUTE, problem: None };
    let held = hold(&mut conn, Instant::now(), &holding).unwrap();
    let query = |held_topics: &[&str], rows| OutboxQuery {
        relay,
        slots: held.slots.iter().map(|slot| (*slot, i64::MIN)).collect(),
        held_topics: held_topics.iter().map(|topic| (*topic).to_owned()).collect(),
        rows,
        bytes: 1_000_000,
    };
    let mut found = |held_topics: &[&str], rows| -> Vec<i64> {
        let rows = read(&mut conn, &query(held_topics, rows)).unwrap().rows;
        rows.into_iter().map(|row| row.id).collect()
    };

    assert_eq!(found(&[], 100), ids);
    let beside = [ids[1], ids[2], ids[4], ids[5], ids[7]];
    assert_eq!(found(&["denied", "unknown"], 100), beside);
    assert_eq!(found(&["denied", "unknown"], 3), beside[..3]);
    assert_eq!(found(&["a", "b", "c", "denied", "unknown"], 100), [0_i64; 0]);
}

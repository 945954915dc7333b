//! Reads are bounded in rows and bytes. Beside held topics they are in the order of ids, over all other topics, whatever
//! waits for the held ones.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::InstrumentationEvent;
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

// Old records of a topic that is denied may be large and many.
#[test]
fn only_the_records_within_the_limits_are_read_completely() {
    let mut conn = SqliteConnection::establish(":memory:").unwrap();
    migrate::migrate(&mut conn).unwrap();
    let of_key = |number: u8| NewOutgoing {
        key: Some(vec![number].into()),
        payload: Some(vec![0; 1_000].into()),
        ..record(if number < 100 { "a" } else { "b" })
    };
    publish(&mut conn, &(0..200).map(of_key).collect::<Vec<_>>()).unwrap();
    let relay = register(&mut conn, "relay", MINUTE).unwrap();
    let holding = Hold { relay, name: "relay".into(), lease: MINUTE, problem: None };
    let held = hold(&mut conn, Instant::now(), &holding).unwrap();
    let read_rows = Arc::new(Mutex::new(0));
    let reading = Arc::clone(&read_rows);
    conn.set_instrumentation(move |event: InstrumentationEvent<'_>| {
        if let InstrumentationEvent::StartQuery { query, .. } = event
            && let text = query.to_string()
            && text.contains("record_key, headers, payload FROM")
        {
            // Each statement ends with its limit; without one it reads one row.
            let limit =
                text.contains(" LIMIT ").then(|| text.rsplit(|c: char| !c.is_ascii_digit()).find(|s| !s.is_empty()));
            *reading.lock().unwrap() += limit.flatten().map_or(1, |limit| limit.parse::<usize>().unwrap());
        }
    });
    let mut found = |held_topics: Vec<String>, rows, bytes| {
        let slots = held.slots.iter().map(|slot| (*slot, i64::MIN)).collect();
        let rows = read(&mut conn, &OutboxQuery { relay, slots, held_topics, rows, bytes }).unwrap().rows;
        (rows.len(), std::mem::take(&mut *read_rows.lock().unwrap()))
    };
    for held_topics in [vec![], vec!["denied".to_owned()]] {
        assert_eq!(found(held_topics.clone(), 100, 1), (1, 1), "a larger record is alone");
        assert_eq!(found(held_topics.clone(), 100, 3_000), (3, 3));
        assert_eq!(found(held_topics.clone(), 100, 30_001), (31, 31), "over several slots");
        assert_eq!(found(held_topics, 40, 1_000_000), (40, 40));
    }
}

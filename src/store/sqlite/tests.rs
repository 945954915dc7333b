//! The ledger as the ingest uses it: no public call reaches all of it. The plans of the statements: `plans.rs`.

mod plans;

use std::sync::Arc;
use std::time::Duration;

use crate::store::ledger::{Ledger, LedgerEntry, LedgerMove, LedgerRow, Opening, Reader, Stopping};
use crate::store::operating::{BackfillStep, Operating, Signed};
use crate::store::seam::{AcceptBatch, Accepted, Answers, HandlerIds, NewDelivery, NewMessage, Seam, WantedHandler};
use crate::store::{Sqlite, Store};
use crate::types::{Headers, Position, StoredMessage};

async fn store() -> (Store<Sqlite>, HandlerIds) {
    let store = Store::<Sqlite>::in_memory().await.unwrap();
    store.migrate().await.unwrap();
    let wanted = WantedHandler { key: "stock".to_owned(), ..WantedHandler::default() };
    let ids = store.backend.register(&[wanted]).await.unwrap().remove(0);
    (store, ids)
}

/// A message without a position, with one delivery.
pub(super) fn new_message(id: String, delivery: NewDelivery) -> NewMessage {
    let message = StoredMessage {
        id: id.into(),
        source: "orders".into(),
        topic: "orders".into(),
        position: None,
        cluster: None,
        key: None,
        headers: Headers::default(),
        payload: None,
        recorded_at: None,
        is_corrected: false,
    };
    NewMessage { message: Arc::new(message), payload_hash: [0; 16], deliveries: smallvec::smallvec![delivery] }
}

/// A delivery that is due at once and has no key.
pub(super) fn new_delivery(ids: &HandlerIds) -> NewDelivery {
    NewDelivery { ids: ids.clone(), due: None, is_handed_over: false, order_hash: None, fair_hash: None }
}

/// A batch without a position, in which nothing is handed over.
pub(super) fn batch(messages: Vec<NewMessage>) -> AcceptBatch {
    AcceptBatch {
        messages,
        quarantined: Vec::new(),
        ledger: Vec::new(),
        processor: None,
        lease: Duration::from_secs(60),
    }
}

fn message(ids: &HandlerIds, offset: i64) -> NewMessage {
    let mut new = new_message(format!("orders/0/{offset}"), new_delivery(ids));
    let stored = Arc::get_mut(&mut new.message).unwrap();
    stored.position = Some(Position { partition: 0, offset });
    new
}

async fn accept(store: &Store<Sqlite>, messages: &[NewMessage], from_offset: i64, next_offset: i64) -> Answers {
    try_accept(store, messages, from_offset, next_offset).await.unwrap()
}

/// `None`: nothing was stored.
async fn try_accept(
    store: &Store<Sqlite>,
    messages: &[NewMessage],
    from_offset: i64,
    next_offset: i64,
) -> Option<Answers> {
    let entry = LedgerEntry {
        reader: Arc::new(shop()),
        topic: "orders".into(),
        partition: 0,
        from_offset,
        next_offset,
        leader_epoch: Some(3),
    };
    let lease = Duration::from_secs(30);
    let (messages, ledger) = (messages.to_vec(), vec![entry]);
    let batch = AcceptBatch { messages, quarantined: Vec::new(), ledger, processor: None, lease };
    store.backend.accept(&Arc::new(batch)).await.unwrap()
}

fn shop() -> Reader {
    Reader { group: "shop".into(), cluster_id: "cluster-1".into() }
}

async fn row(store: &Store<Sqlite>) -> Option<LedgerRow> {
    store.backend.ledger(&shop(), &[("orders".into(), 0)]).await.unwrap().remove(0)
}

async fn next_offset(store: &Store<Sqlite>) -> Option<i64> {
    row(store).await.map(|row| row.next_offset)
}

fn opening(at: i64, gap_from: Option<i64>) -> Opening {
    Opening { topic: "orders".into(), topic_id: None, partition: 0, read: gap_from, at, gap_from }
}

#[tokio::test]
async fn the_ledger_moves_with_the_batch_and_never_back() {
    let (store, ids) = store().await;
    assert_eq!(next_offset(&store).await, None);
    // The ledger has no row yet.
    assert!(try_accept(&store, &[], 0, 1).await.is_none());

    store.backend.open_ledger(&shop(), &[opening(5, None)]).await.unwrap();
    let answers = accept(&store, &[message(&ids, 5), message(&ids, 6)], 5, 7).await;
    assert!(matches!(answers.messages[..], [Accepted::New { seq: 1 }, Accepted::New { seq: 2 }]));
    assert_eq!((answers.ledger, next_offset(&store).await), (vec![LedgerMove::Moved], Some(7)));

    // A late process that accepts stored records again, and one that expects a later position than the ledger has.
    let late = accept(&store, &[message(&ids, 5)], 5, 6).await;
    assert!(matches!(late.messages[..], [Accepted::Duplicate { seq: 1, added: 0 }]));
    assert_eq!(late.ledger, [LedgerMove::Moved]);
    assert!(try_accept(&store, &[], 9, 10).await.is_none());
    assert_eq!(next_offset(&store).await, Some(7));

    assert_eq!(store.backend.open_ledger(&shop(), &[opening(3, None)]).await.unwrap(), [false]);
    assert_eq!(next_offset(&store).await, Some(7));
}

// On PostgreSQL: `kafka::position`.
#[tokio::test]
async fn a_position_that_was_moved_after_it_was_read_is_not_overwritten() {
    let (store, _) = store().await;
    let of = |partition, at, gap_from| Opening { partition, ..opening(at, gap_from) };
    let open = async |openings: &[Opening]| store.backend.open_ledger(&shop(), openings).await.unwrap();
    assert_eq!(open(&[of(0, 5, None), of(1, 5, None)]).await, [true, true]);

    // Both were read at 5, and the first one has been set back.
    let set_back = Opening { read: Some(5), ..of(0, 2, None) };
    assert_eq!(open(&[set_back]).await, [true]);
    assert_eq!(open(&[of(0, 9, Some(5)), of(1, 9, Some(5))]).await, [false, true]);

    let report = store.backend.ledger_report("shop").await.unwrap();
    let offsets: Vec<i64> = report.partitions.iter().map(|state| state.next_offset).collect();
    let gaps: Vec<i32> = report.gaps.iter().map(|gap| gap.partition).collect();
    assert_eq!((offsets, gaps), (vec![2, 9], vec![1]), "the gap of a position that was not written is not stored");
}

// On PostgreSQL: `kafka::beginning`.
#[tokio::test]
async fn a_topic_begins_once_and_its_ledger_rows_stay() {
    let (store, _) = store().await;
    let of = |partition, at| Opening { partition, ..opening(at, None) };
    let topics: [std::sync::Arc<str>; 2] = ["orders".into(), "others".into()];
    assert_eq!(store.backend.has_ledger(&shop(), &topics).await.unwrap(), [false, false]);
    store.backend.begin_topic(&shop(), &[of(0, 5), of(1, 0)]).await.unwrap();
    assert_eq!(store.backend.has_ledger(&shop(), &topics).await.unwrap(), [true, false]);

    // A process that was slower saw another end, and one more partition.
    store.backend.begin_topic(&shop(), &[of(0, 7), of(2, 9)]).await.unwrap();
    let places: Vec<_> = (0..3).map(|partition| (topics[0].clone(), partition)).collect();
    let rows = store.backend.ledger(&shop(), &places).await.unwrap();
    let offsets: Vec<_> = rows.into_iter().map(|row| row.map(|row| row.next_offset)).collect();
    assert_eq!(offsets, [Some(5), Some(0), None]);
}

// On PostgreSQL: `kafka::pipeline`.
#[tokio::test]
async fn a_following_batch_is_written_only_after_the_earlier_one() {
    let (store, ids) = store().await;
    store.backend.open_ledger(&shop(), &[opening(0, None)]).await.unwrap();
    assert!(try_accept(&store, &[message(&ids, 1)], 1, 2).await.is_none());
    assert_eq!(next_offset(&store).await, Some(0));

    accept(&store, &[message(&ids, 0)], 0, 1).await;
    let answers = try_accept(&store, &[message(&ids, 1)], 1, 2).await.unwrap();
    assert!(matches!(answers.messages[..], [Accepted::New { seq: 2 }]));
    assert_eq!((answers.ledger, next_offset(&store).await), (vec![LedgerMove::Moved], Some(2)));

    let stop = Stopping { topic: "orders".into(), partition: 0, next_offset: 2, why: "cut".to_owned() };
    store.backend.stop_partitions(&shop(), &[stop]).await.unwrap();
    assert!(try_accept(&store, &[message(&ids, 2)], 2, 3).await.is_none());
}

// The database has lost what a process had stored. On PostgreSQL: `kafka::position`.
#[tokio::test]
async fn a_batch_beyond_the_ledger_stores_nothing() {
    let (store, ids) = store().await;
    store.backend.open_ledger(&shop(), &[opening(0, None)]).await.unwrap();
    let stored = async || store.backend.ledger_report("shop").await.unwrap().partitions[0].stored;
    assert!(try_accept(&store, &[message(&ids, 5), message(&ids, 6)], 5, 7).await.is_none());
    assert_eq!((stored().await, next_offset(&store).await), (0, Some(0)));

    // A batch whose first try was committed, without an answer: its ledger is at its end.
    for _ in 0..2 {
        assert_eq!(accept(&store, &[message(&ids, 0)], 0, 1).await.ledger, [LedgerMove::Moved]);
    }
    // A part of a batch without a record of this partition is stored unless the ledger is behind the batch, and does not
    // move the ledger.
    let entry = |from_offset, next_offset| LedgerEntry {
        reader: Arc::new(shop()),
        topic: "orders".into(),
        partition: 0,
        from_offset,
        next_offset,
        leader_epoch: Some(4),
    };
    for (from_offset, is_stored) in [(1, true), (2, false)] {
        let ledger = vec![entry(from_offset, from_offset + 2).check()];
        let part = AcceptBatch { ledger, ..batch(vec![message(&ids, from_offset)]) };
        assert_eq!(store.backend.accept(&Arc::new(part)).await.unwrap().is_some(), is_stored);
    }
    let LedgerRow { next_offset, leader_epoch, .. } = row(&store).await.unwrap();
    assert_eq!((stored().await, next_offset, leader_epoch), (2, 1, Some(3)));
}

#[tokio::test]
async fn gaps_are_recorded_once_and_the_report_counts_stored_records() {
    let (store, ids) = store().await;
    store.backend.open_ledger(&shop(), &[opening(5, None)]).await.unwrap();
    accept(&store, &[message(&ids, 5)], 5, 6).await;
    // The answer to the first one was lost.
    for is_written in [true, false] {
        assert_eq!(store.backend.open_ledger(&shop(), &[opening(9, Some(6))]).await.unwrap(), [is_written]);
    }

    let report = store.backend.ledger_report("shop").await.unwrap();

    let [state] = &report.partitions[..] else { panic!("{report:?}") };
    assert_eq!((state.next_offset, state.stored, state.highest_stored), (9, 1, Some(5)));
    let [gap] = &report.gaps[..] else { panic!("{report:?}") };
    assert_eq!((gap.from_offset, gap.to_offset), (6, 9));
    assert!(store.backend.ledger_report("another").await.unwrap().partitions.is_empty());
}

#[tokio::test]
async fn a_stopped_ledger_keeps_its_position_and_a_position_belongs_to_one_cluster() {
    let (store, ids) = store().await;
    store.backend.open_ledger(&shop(), &[opening(5, None)]).await.unwrap();
    accept(&store, &[message(&ids, 5)], 5, 6).await;
    assert_eq!(row(&store).await.unwrap().leader_epoch, Some(3));
    let stop = |next_offset| Stopping { topic: "orders".into(), partition: 0, next_offset, why: "cut".to_owned() };

    // The ledger has moved since the problem was found.
    store.backend.stop_partitions(&shop(), &[stop(5)]).await.unwrap();
    assert_eq!(row(&store).await.unwrap().stopped, None);
    store.backend.stop_partitions(&shop(), &[stop(6)]).await.unwrap();

    assert_eq!(row(&store).await.unwrap().stopped.as_deref(), Some("cut"));
    assert!(try_accept(&store, &[message(&ids, 6)], 6, 7).await.is_none());
    let beyond = Opening { read: Some(6), ..opening(9, None) };
    assert_eq!(store.backend.open_ledger(&shop(), &[beyond]).await.unwrap(), [false]);
    assert_eq!(next_offset(&store).await, Some(6));
    let other = Reader { cluster_id: "cluster-2".into(), ..shop() };
    assert_eq!(store.backend.ledger(&other, &[("orders".into(), 0)]).await.unwrap(), [None]);
}

#[tokio::test]
async fn the_backlog_is_counted_up_to_a_limit() {
    let (store, ids) = store().await;
    assert_eq!(store.backend.backlog(&ids.all, 10).await.unwrap().open, 0);
    store.backend.open_ledger(&shop(), &[opening(0, None)]).await.unwrap();
    let messages: Vec<NewMessage> = (0..5).map(|offset| message(&ids, offset)).collect();
    accept(&store, &messages, 0, 5).await;

    let open = async |count_max| store.backend.backlog(&ids.all, count_max).await.unwrap().open;

    assert_eq!((open(10).await, open(3).await), (5, 3));
}

#[tokio::test]
async fn a_step_of_a_backfill_reads_a_bounded_part_of_the_messages() {
    const MESSAGES: i64 = 20_001;
    let (store, ids) = store().await;
    let messages = (0..MESSAGES).map(|offset| message(&ids, offset)).collect();
    store.backend.accept(&Arc::new(batch(messages))).await.unwrap().unwrap();
    let step = |after_seq| BackfillStep {
        handler_key: "stock".to_owned(),
        // No message is of this topic.
        topics: vec!["returns".to_owned()],
        newer_than: None,
        after_seq,
        limit: 100,
        filter: "{}".to_owned(),
        act: None,
    };

    let steps = async |after| store.backend.backfill(step(after), Signed::default()).await.unwrap();

    let first = steps(0).await;
    assert_eq!((first.made, first.next_seq), (0, Some(MESSAGES - 1)));
    // The second step finds the end.
    let second = steps(MESSAGES - 1).await;
    assert_eq!((second.made, second.next_seq), (0, None));
}

//! The facts about a partition, with and without a reply from Kafka.

use super::super::native::leader::Watermarks;
use super::*;

fn place() -> TopicPartition {
    ("orders".into(), 0)
}

/// A partition whose ledger is at 5, of a topic with this id.
fn sought(topic_id: Option<&str>) -> PartitionToFind {
    let ledger = LedgerRow { next_offset: 5, leader_epoch: None, topic_id: topic_id.map(str::to_owned), stopped: None };
    PartitionToFind {
        asked: Asked { place: place(), generation: 1, stored: None, cut: None, has_marks: false, is_told: false },
        ledger: Some(ledger),
        decided: None,
    }
}

/// The answers of a leader: where the log begins and ends, and the topic id; `None`: no answer about the id.
fn answers(topic_id: Option<Option<&str>>) -> Answers {
    let topic_ids = topic_id.map(|id| (place().0, id.map(str::to_owned)));
    Answers {
        watermarks: [(place(), Ok(Watermarks { low: 0, high: 9 }))].into(),
        topic_ids: topic_ids.into_iter().collect(),
    }
}

fn topic(sought: &PartitionToFind, mut answers: Answers) -> Option<Topic> {
    known(sought, &mut answers, &Offsets::new()).ok().map(|known| known.topic)
}

#[test]
fn without_an_answer_about_the_id_a_ledger_that_has_one_is_asked_again() {
    assert_eq!(topic(&sought(Some("A")), answers(None)), None);
    assert_eq!(topic(&sought(None), answers(None)), Some(Topic::Same));
}

#[test]
fn another_id_is_another_topic_and_a_broker_without_ids_is_believed() {
    assert_eq!(topic(&sought(Some("A")), answers(Some(Some("A")))), Some(Topic::Same));
    assert_eq!(topic(&sought(Some("A")), answers(Some(Some("B")))), Some(Topic::Recreated));
    assert_eq!(topic(&sought(Some("A")), answers(Some(None))), Some(Topic::Same));
    assert_eq!(topic(&sought(None), answers(Some(Some("B")))), Some(Topic::Same));
}

#[test]
fn without_an_answer_about_the_log_nothing_is_known() {
    let nothing = Answers { watermarks: HashMap::new(), ..answers(Some(Some("A"))) };
    assert_eq!(topic(&sought(Some("A")), nothing), None);
}

#[test]
fn without_a_ledger_the_group_decides_and_its_coordinator_must_answer() {
    let new = PartitionToFind { ledger: None, ..sought(None) };
    let committed = |answer: KafkaResult<Committed>| {
        known(&new, &mut answers(None), &[(place(), answer)].into()).map(|known| known.committed)
    };
    assert_eq!(committed(Ok(Committed::ByAnother(3))), Ok(Committed::ByAnother(3)));
    assert!(committed(Err(KafkaError::Canceled)).is_err());
    // This process has read it before, so the database has lost its position.
    let read = PartitionToFind { asked: Asked { stored: Some(5), ..new.asked.clone() }, ledger: None, decided: None };
    let known = known(&read, &mut answers(None), &Offsets::new()).map(|known| known.committed);
    assert_eq!(known, Ok(Committed::ByUs));
}

//! Says which deliveries of a handler are in one order: a hash of the record's key. Pure.
//!
//! Two keys with one hash are in one order: they wait for each other, and nothing else is lost by it.

use sha2::{Digest, Sha256};

use super::field::{Field, read};
use super::json;
use crate::handler::{OrderKey, OrderPlace};
use crate::types::Record;

/// The order that a record's delivery is in; `None` when it is in none.
pub(super) fn order_hash(record: &Record, order: &OrderKey) -> Option<i64> {
    let value = read(record, field(&order.place)).ok().flatten().filter(|value| !value.is_empty())?;
    let hash = Sha256::digest(&value);
    let mut short = [0; 8];
    short.copy_from_slice(&hash[..8]);
    Some(i64::from_be_bytes(short))
}

fn field(place: &OrderPlace) -> Field<'_> {
    match place {
        OrderPlace::RecordKey => Field::Key,
        OrderPlace::Header(name) => Field::Header(name),
        OrderPlace::JsonPointer(pointer) => Field::JsonPointer(pointer),
        OrderPlace::Function(function) => Field::Function(&**function),
    }
}

/// Why an order cannot work.
pub(super) fn problem(order: &OrderKey) -> Option<String> {
    match &order.place {
        OrderPlace::RecordKey | OrderPlace::Function(_) => None,
        OrderPlace::Header(name) => name.is_empty().then(|| "the header has no name".to_owned()),
        OrderPlace::JsonPointer(pointer) => {
            json::pointer_problem(pointer).map(|problem| format!("{pointer:?}: {problem}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record::new("orders")
            .with_key("a")
            .with_header("customer", "7")
            .with_payload(r#"{"customer": {"id": 7, "name": "x", "none": null}}"#)
    }

    #[test]
    fn the_same_value_is_one_order_wherever_it_stands() {
        let seven = order_hash(&record(), &OrderKey::header("customer"));
        assert!(seven.is_some());
        assert_eq!(order_hash(&record(), &OrderKey::json_pointer("/customer/id")), seven);
        assert_eq!(order_hash(&record(), &OrderKey::by(|_| Some("7"))), seven);
        assert_ne!(order_hash(&record(), &OrderKey::record_key()), seven);
    }

    #[test]
    fn a_record_without_a_value_that_can_be_read_is_in_no_order() {
        let none = [
            OrderKey::header("tenant"),
            OrderKey::json_pointer("/customer"),
            OrderKey::json_pointer("/customer/none"),
            OrderKey::json_pointer("/nothing"),
            OrderKey::by(|_| None::<&str>),
            OrderKey::by(|_| Some("")),
            OrderKey::by(|record| record.id().map(|_| panic!("a record that has no id yet")).map(|()| "x")),
        ];
        for order in none {
            assert_eq!(order_hash(&record().with_id("x"), &order), None, "{order:?}");
        }
        assert_eq!(order_hash(&Record::new("orders"), &OrderKey::record_key()), None);
        assert_eq!(order_hash(&Record::new("orders").with_payload("{"), &OrderKey::json_pointer("/a")), None);
    }

    #[test]
    fn an_order_that_cannot_work_says_why() {
        assert_eq!(problem(&OrderKey::header("")).as_deref(), Some("the header has no name"));
        assert_eq!(
            problem(&OrderKey::json_pointer("id")).as_deref(),
            Some("\"id\": a JSON pointer begins with a slash")
        );
        assert_eq!(problem(&OrderKey::json_pointer("/id")), None);
        assert_eq!(problem(&OrderKey::record_key()), None);
    }
}

//! Computes the ordering key and the tenant of a delivery: a hash of a value of the record. Pure.
//!
//! Two values with the same hash share one order, or the turns of one tenant. Their deliveries wait for each other,
//! which costs time but breaks no guarantee.

use sha2::{Digest, Sha256};

use super::field::{Field, read};
use super::json;
use crate::handler::{FairKey, KeyPlace, OrderKey};
use crate::types::Record;

/// The tenant hash of all deliveries of a fair handler that have no tenant. The SQL functions of the schema use the
/// same value.
const NO_TENANT: i64 = 0;

/// The hash of a record's ordering key; `None` when the record has none, or when it cannot be read.
pub(super) fn order_hash(record: &Record, order: &OrderKey) -> Option<i64> {
    key_hash(record, &order.place)
}

/// The hash of a record's tenant. All records without a tenant share [`NO_TENANT`].
pub(super) fn fair_hash(record: &Record, fair: &FairKey) -> i64 {
    key_hash(record, &fair.place).unwrap_or(NO_TENANT)
}

/// The first eight bytes of the SHA-256 of the value. It is stored, so it must never change.
fn key_hash(record: &Record, place: &KeyPlace) -> Option<i64> {
    let value = read(record, field(place)).ok().flatten().filter(|value| !value.is_empty())?;
    let hash = Sha256::digest(&value);
    let mut short = [0; 8];
    short.copy_from_slice(&hash[..8]);
    Some(i64::from_be_bytes(short))
}

fn field(place: &KeyPlace) -> Field<'_> {
    match place {
        KeyPlace::RecordKey => Field::Key,
        KeyPlace::Header(name) => Field::Header(name),
        KeyPlace::JsonPointer(pointer) => Field::JsonPointer(pointer),
        KeyPlace::Function(function) => Field::Function(&**function),
    }
}

/// What is wrong with the definition of a key; `None` if it can be used.
pub(super) fn problem(place: &KeyPlace) -> Option<String> {
    match place {
        KeyPlace::RecordKey | KeyPlace::Function(_) => None,
        KeyPlace::Header(name) => name.is_empty().then(|| "the header name is empty".to_owned()),
        KeyPlace::JsonPointer(pointer) => {
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
    fn a_tenant_is_told_by_its_value_and_all_records_without_one_are_of_the_same() {
        let seven = fair_hash(&record(), &FairKey::header("customer"));
        assert_eq!(seven, fair_hash(&record(), &FairKey::json_pointer("/customer/id")));
        assert_ne!(seven, NO_TENANT);
        let none = [FairKey::header("tenant"), FairKey::by(|_| None::<&str>), FairKey::json_pointer("/customer")];
        assert!(none.iter().all(|fair| fair_hash(&record(), fair) == NO_TENANT));
    }

    #[test]
    fn an_order_that_cannot_work_says_why() {
        assert_eq!(problem(&OrderKey::header("").place).as_deref(), Some("the header name is empty"));
        assert_eq!(
            problem(&OrderKey::json_pointer("id").place).as_deref(),
            Some("\"id\": a JSON pointer begins with a slash")
        );
        assert_eq!(problem(&OrderKey::json_pointer("/id").place), None);
        assert_eq!(problem(&OrderKey::record_key().place), None);
    }
}

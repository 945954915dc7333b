//! Bounds how deeply a message is nested, before it becomes JSON.
//!
//! The decoder bounds the nesting of a message, but a `google.protobuf.Any` has another message as bytes. That message
//! is decoded only when the JSON is built, with a bound of its own. Without a bound over all of them, a payload of
//! 100 kB could overflow the stack and end the process.

use prost_reflect::{DynamicMessage, ReflectMessage, Value};

use crate::types::Undecoded;

/// The most messages within each other, whether directly or in an `Any`. It is also prost's bound for one message.
const LEVELS_MAX: u8 = 100;
const ANY: &str = "google.protobuf.Any";

/// Refuses a message that is nested too deeply to become JSON.
pub(super) fn check(message: &DynamicMessage) -> Result<(), Undecoded> {
    match message.descriptor().parent_pool().get_message_by_name(ANY) {
        Some(_) => check_message(message, LEVELS_MAX),
        // Without `Any` in the schema, the decoder has bounded the whole message.
        None => Ok(()),
    }
}

/// Recurses at most `LEVELS_MAX` times.
fn check_message(message: &DynamicMessage, levels_left: u8) -> Result<(), Undecoded> {
    let left = levels_left.checked_sub(1).ok_or("the Protobuf message is nested too deeply")?;
    if message.descriptor().full_name() == ANY {
        return check_message(&within(message)?, left);
    }
    message.fields().try_for_each(|(_, value)| check_value(value, left))?;
    message.extensions().try_for_each(|(_, value)| check_value(value, left))
}

fn check_value(value: &Value, levels_left: u8) -> Result<(), Undecoded> {
    match value {
        Value::Message(message) => check_message(message, levels_left),
        Value::List(values) => values.iter().try_for_each(|value| check_value(value, levels_left)),
        Value::Map(entries) => entries.values().try_for_each(|value| check_value(value, levels_left)),
        _ => Ok(()),
    }
}

/// Decodes the message within an `Any`.
fn within(any: &DynamicMessage) -> Result<DynamicMessage, Undecoded> {
    let (url, bytes) = (any.get_field_by_number(1), any.get_field_by_number(2));
    let name = url.as_deref().and_then(Value::as_str).and_then(|url| url.rsplit('/').next()).unwrap_or_default();
    let descriptor = any.descriptor().parent_pool().get_message_by_name(name);
    // The name is a part of the payload, so the error does not contain it.
    let descriptor = descriptor.ok_or("a google.protobuf.Any has a message that the schema does not have")?;
    let bytes = bytes.as_deref().and_then(Value::as_bytes).cloned().unwrap_or_default();
    Ok(DynamicMessage::decode(descriptor, bytes)?)
}

#[cfg(test)]
mod tests {
    use super::super::{compiled, to_json};
    use super::*;

    const PROTO: &str = r#"syntax = "proto3"; package shop; import "google/protobuf/any.proto";
        message Order { google.protobuf.Any any = 1; Order order = 2; map<string, Order> by_name = 3; int32 number = 4; }"#;

    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut length = Vec::new();
        prost::encoding::encode_varint(bytes.len() as u64, &mut length);
        [&[number << 3 | 2], &*length, bytes].concat()
    }

    /// An `Any` with this message.
    fn any(name: &str, message: &[u8]) -> Vec<u8> {
        [field(1, format!("type.googleapis.com/{name}").as_bytes()), field(2, message)].concat()
    }

    fn json(bytes: &[u8]) -> Result<serde_json::Value, String> {
        let order = compiled(Vec::new(), PROTO).unwrap().messages().next().unwrap();
        let message = DynamicMessage::decode(order, bytes).unwrap();
        to_json(&message).map_err(|undecoded| undecoded.to_string())
    }

    const TOO_DEEP: &str = "the Protobuf message is nested too deeply";

    #[test]
    fn any_within_any_is_undecodable_beyond_a_bound_and_ends_no_process() {
        let mut bytes = any("shop.Order", &[4 << 3, 17]);
        for _ in 0..10 {
            bytes = any(ANY, &bytes);
        }
        let mut value = json(&field(1, &bytes)).unwrap()["any"].take();
        for _ in 0..10 {
            value = value["value"].take();
        }
        assert_eq!(value["number"], 17);
        for _ in 0..6_000 {
            bytes = any(ANY, &bytes);
        }
        assert_eq!(json(&field(1, &bytes)), Err(TOO_DEEP.to_owned()));
    }

    #[test]
    fn messages_and_any_share_one_bound_which_fits_on_the_stack_of_a_worker() {
        let mut bytes = vec![4 << 3, 17];
        // Each round has two levels, and a third one in the map.
        for round in 0..33 {
            bytes = field(1, &any("shop.Order", &bytes));
            bytes =
                if round % 2 == 0 { field(2, &bytes) } else { field(3, &[field(1, b"x"), field(2, &bytes)].concat()) };
        }
        assert!(json(&bytes).is_ok());
        bytes = field(2, &bytes);
        assert_eq!(json(&bytes), Err(TOO_DEEP.to_owned()));
    }

    #[test]
    fn an_any_of_an_unknown_message_is_undecodable_and_not_quoted() {
        for name in ["shop.Secret", "", "/"] {
            let error = json(&field(1, &any(name, b""))).unwrap_err();
            assert_eq!(error, "a google.protobuf.Any has a message that the schema does not have");
        }
    }
}

//! The `.proto` files that Confluent's serializers have built in: a schema may import them, and the registry does not
//! list them as references. These are the public definitions without their comments.

use super::Files;

/// The built-in files. Those of `google/protobuf` are known to the compiler.
pub(super) fn files() -> Files {
    let file = |(name, package, body): &(&str, &str, &str)| {
        (
            format!("{package}/{name}.proto"),
            format!("syntax = \"proto3\"; package {}; {body}", package.replace('/', ".")),
        )
    };
    Files(BUILT_IN.iter().map(file).collect())
}

/// Name, package and definitions of each file.
const BUILT_IN: [(&str, &str, &str); 19] = [
    (
        "meta",
        "confluent",
        r#"import "google/protobuf/descriptor.proto";
        message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; }
        extend google.protobuf.FileOptions { Meta file_meta = 1088; }
        extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
        extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
        extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
        extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }"#,
    ),
    ("decimal", "confluent/type", "message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }"),
    (
        "calendar_period",
        "google/type",
        "enum CalendarPeriod { CALENDAR_PERIOD_UNSPECIFIED = 0; DAY = 1; WEEK = 2; FORTNIGHT = 3; MONTH = 4;
        QUARTER = 5; HALF = 6; YEAR = 7; }",
    ),
    (
        "color",
        "google/type",
        r#"import "google/protobuf/wrappers.proto";
        message Color { float red = 1; float green = 2; float blue = 3; google.protobuf.FloatValue alpha = 4; }"#,
    ),
    ("date", "google/type", "message Date { int32 year = 1; int32 month = 2; int32 day = 3; }"),
    (
        "datetime",
        "google/type",
        r#"import "google/protobuf/duration.proto";
        message DateTime { int32 year = 1; int32 month = 2; int32 day = 3; int32 hours = 4; int32 minutes = 5;
        int32 seconds = 6; int32 nanos = 7;
        oneof time_offset { google.protobuf.Duration utc_offset = 8; TimeZone time_zone = 9; } }
        message TimeZone { string id = 1; string version = 2; }"#,
    ),
    (
        "dayofweek",
        "google/type",
        "enum DayOfWeek { DAY_OF_WEEK_UNSPECIFIED = 0; MONDAY = 1; TUESDAY = 2; WEDNESDAY = 3; THURSDAY = 4;
        FRIDAY = 5; SATURDAY = 6; SUNDAY = 7; }",
    ),
    ("decimal", "google/type", "message Decimal { string value = 1; }"),
    (
        "expr",
        "google/type",
        "message Expr { string expression = 1; string title = 2; string description = 3; string location = 4; }",
    ),
    ("fraction", "google/type", "message Fraction { int64 numerator = 1; int64 denominator = 2; }"),
    (
        "interval",
        "google/type",
        r#"import "google/protobuf/timestamp.proto";
        message Interval { google.protobuf.Timestamp start_time = 1; google.protobuf.Timestamp end_time = 2; }"#,
    ),
    ("latlng", "google/type", "message LatLng { double latitude = 1; double longitude = 2; }"),
    ("localized_text", "google/type", "message LocalizedText { string text = 1; string language_code = 2; }"),
    ("money", "google/type", "message Money { string currency_code = 1; int64 units = 2; int32 nanos = 3; }"),
    (
        "month",
        "google/type",
        "enum Month { MONTH_UNSPECIFIED = 0; JANUARY = 1; FEBRUARY = 2; MARCH = 3; APRIL = 4; MAY = 5; JUNE = 6;
        JULY = 7; AUGUST = 8; SEPTEMBER = 9; OCTOBER = 10; NOVEMBER = 11; DECEMBER = 12; }",
    ),
    (
        "phone_number",
        "google/type",
        "message PhoneNumber { message ShortCode { string region_code = 1; string number = 2; }
        oneof kind { string e164_number = 1; ShortCode short_code = 2; } string extension = 3; }",
    ),
    (
        "postal_address",
        "google/type",
        "message PostalAddress { int32 revision = 1; string region_code = 2; string language_code = 3;
        string postal_code = 4; string sorting_code = 5; string administrative_area = 6; string locality = 7;
        string sublocality = 8; repeated string address_lines = 9; repeated string recipients = 10;
        string organization = 11; }",
    ),
    ("quaternion", "google/type", "message Quaternion { double x = 1; double y = 2; double z = 3; double w = 4; }"),
    (
        "timeofday",
        "google/type",
        "message TimeOfDay { int32 hours = 1; int32 minutes = 2; int32 seconds = 3; int32 nanos = 4; }",
    ),
];

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use prost_reflect::DynamicMessage;
    use serde_json::json;

    use super::super::{compiled, to_json};
    use super::*;

    #[test]
    fn a_schema_can_import_what_confluents_serializers_have_built_in() {
        let mut text = "syntax = \"proto3\";".to_owned();
        for (name, _) in files().0 {
            write!(text, "import \"{name}\";").unwrap();
        }
        text += r#"message Order { google.type.Money price = 1 [(confluent.field_meta).doc = "in all"];
            google.type.DayOfWeek day = 2; confluent.type.Decimal weight = 3; }"#;
        let file = compiled(Vec::new(), &text).unwrap();
        let order = file.messages().next().unwrap();
        let order =
            DynamicMessage::decode(order, &b"\x0a\x07\x0a\x03EUR\x10\x11\x10\x03\x1a\x03\x0a\x01\x07"[..]).unwrap();
        let price = json!({ "currency_code": "EUR", "units": 17, "nanos": 0 });
        let weight = json!({ "value": "Bw==", "precision": 0, "scale": 0 });
        assert_eq!(to_json(&order), Ok(json!({ "price": price, "day": "WEDNESDAY", "weight": weight })));
    }

    #[test]
    fn a_file_among_the_references_takes_the_place_of_a_built_in_one() {
        let own = "syntax = \"proto3\"; package google.type; message Money { string all = 1; }";
        let references = vec![("google/type/money.proto".to_owned(), own.to_owned())];
        let text = "syntax = \"proto3\"; import \"google/type/money.proto\"; message M { google.type.Money m = 1; }";
        let file = compiled(references, text).unwrap();
        assert!(
            file.parent_pool().get_message_by_name("google.type.Money").unwrap().get_field_by_name("all").is_some()
        );
    }
}

//! The bytes of an Avro value that are left to read. Every length is checked against them. Errors never quote them.

use std::fmt;

use serde::de::{self, Expected, Unexpected};

use super::super::wire::split_varint;

/// The most items that take no bytes, such as `null`, and the most fields of records that take none. Without it, a few
/// bytes could ask for billions of items.
const EMPTY_ITEMS_MAX: usize = 65_536;
/// The most digits after the decimal point of a decimal.
const SCALE_MAX: usize = 100;

const TOO_MANY: &str = "the Avro arrays and maps have more items than their bytes allow";
pub(super) const CUT_OFF: &str = "the Avro value is cut off";

/// Why decoding failed, without any payload data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReadError(pub(super) String);

impl From<&str> for ReadError {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ReadError {}

impl de::Error for ReadError {
    /// Drops the text, because it may quote the payload.
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self::from("invalid for the handler's type")
    }

    fn invalid_type(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self(format!("expected {expected}"))
    }

    fn invalid_value(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self(format!("expected {expected}"))
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self(format!("expected {expected}, and there are {length}"))
    }

    fn unknown_variant(_: &str, expected: &'static [&'static str]) -> Self {
        Self(format!("expected one of {}", expected.join(", ")))
    }

    fn missing_field(field: &'static str) -> Self {
        Self(format!("missing field `{field}`"))
    }
}

/// The bytes that are left to read, and how many items they may still contain.
pub(super) struct Input<'b> {
    pub(super) rest: &'b [u8],
    /// Items of arrays and maps. Those with bytes cannot be more than the bytes.
    items_left: usize,
    /// Fields of records that take no bytes.
    empty_fields_left: usize,
}

impl<'b> Input<'b> {
    pub(super) fn new(bytes: &'b [u8]) -> Self {
        let items_left = bytes.len().saturating_add(EMPTY_ITEMS_MAX);
        Self { rest: bytes, items_left, empty_fields_left: EMPTY_ITEMS_MAX }
    }

    /// An `int` or a `long`.
    pub(super) fn long(&mut self) -> Result<i64, ReadError> {
        let (number, rest) = split_varint(self.rest).ok_or(CUT_OFF)?;
        self.rest = rest;
        Ok(number)
    }

    pub(super) fn bytes(&mut self, length: usize) -> Result<&'b [u8], ReadError> {
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or(CUT_OFF)?;
        self.rest = rest;
        Ok(bytes)
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], ReadError> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(CUT_OFF)?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// Bytes with their length before them.
    pub(super) fn with_length(&mut self) -> Result<&'b [u8], ReadError> {
        let length = usize::try_from(self.long()?).map_err(|_| ReadError::from("an Avro length is negative"))?;
        self.bytes(length)
    }

    pub(super) fn text(&mut self) -> Result<&'b str, ReadError> {
        utf8(self.with_length()?)
    }

    pub(super) fn boolean(&mut self) -> Result<bool, ReadError> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [_] => Err(ReadError::from("an Avro boolean is neither 0 nor 1")),
        }
    }

    /// The number of items in the next block of an array or a map; 0 at the end.
    pub(super) fn block(&mut self) -> Result<usize, ReadError> {
        let count = self.long()?;
        if count < 0 {
            // A negative count is followed by the block's size in bytes, which only readers that skip it need.
            self.long()?;
        }
        let count = usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX);
        self.items_left = self.items_left.checked_sub(count).ok_or(TOO_MANY)?;
        Ok(count)
    }

    /// Counts a record that took no bytes. With `n` such records within each other, a schema can ask for 2^n of them.
    pub(super) fn empty_record(&mut self, fields: usize) -> Result<(), ReadError> {
        self.empty_fields_left = self.empty_fields_left.checked_sub(fields.saturating_add(1)).ok_or(TOO_MANY)?;
        Ok(())
    }
}

pub(super) fn utf8(bytes: &[u8]) -> Result<&str, ReadError> {
    std::str::from_utf8(bytes).map_err(|_| ReadError::from("an Avro string is not UTF-8"))
}

/// The text of a big-endian number in two's complement, with `scale` digits after the decimal point.
pub(super) fn decimal(bytes: &[u8], scale: usize) -> Result<String, ReadError> {
    if bytes.len() > 16 || scale > SCALE_MAX {
        return Err(ReadError::from("an Avro decimal has more than 16 bytes, or more than 100 digits after the point"));
    }
    let sign = bytes.first().map_or(0, |first| if first & 0x80 == 0 { 0 } else { -1_i128 });
    let number = bytes.iter().fold(sign, |number, byte| (number << 8) | i128::from(*byte));
    let digits = format!("{:0>width$}", number.unsigned_abs(), width = scale + 1);
    let (whole, behind) = digits.split_at(digits.len() - scale);
    let (minus, point) = (if number < 0 { "-" } else { "" }, if scale == 0 { "" } else { "." });
    Ok(format!("{minus}{whole}{point}{behind}"))
}

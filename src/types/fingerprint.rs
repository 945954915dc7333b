//! Groups similar errors: words with a digit in them (numbers, ids, addresses) are treated as equal.
//!
//! The SQL function `inbox_fingerprint` computes the same value; a test compares the two.

use sha2::{Digest, Sha256};

/// Returns eight characters that are equal for errors that differ only in numbers and ids.
///
/// ```
/// use wharf::operate::fingerprint;
///
/// assert_eq!(fingerprint("timed out after 30 ms"), fingerprint("timed out after 4512 ms"));
/// ```
pub fn fingerprint(error: &str) -> String {
    let hash = Sha256::digest(without_numbers(error));
    hash[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Replaces each word that contains a digit by `#`.
fn without_numbers(error: &str) -> String {
    let mut common = String::with_capacity(error.len());
    let mut rest = error;
    while !rest.is_empty() {
        let is_word = |character: char| character.is_ascii_alphanumeric() || character == '-';
        let word = &rest[..rest.find(|character| !is_word(character)).unwrap_or(rest.len())];
        let other = &rest[word.len()..];
        let other = &other[..other.find(is_word).unwrap_or(other.len())];
        common.push_str(if word.contains(|character: char| character.is_ascii_digit()) { "#" } else { word });
        common.push_str(other);
        rest = &rest[word.len() + other.len()..];
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_differ_in_numbers_and_ids_are_the_same() {
        let one = fingerprint("timeout after 30 ms calling 10.0.0.1 for 0f8fad5b-d9cb-469f-a165-70867728950e");
        let other = fingerprint("timeout after 4512 ms calling 10.1.2.3 for 7c9e6679-7425-40de-944b-e07fc1f90ae7");
        assert_eq!(one, other);
        assert_eq!(one.len(), 8);
        assert_ne!(one, fingerprint("refused"));
        assert_eq!(without_numbers("a1 b-c é2!"), "# b-c é#!");
    }
}

//! The hash of an identity in 16 bytes, kept after its message is purged. The library and every database compute the
//! same hash.

use sha2::{Digest, Sha256};

/// 16 bytes of SHA-256: enough to make collisions infeasible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IdentityHash(pub(super) [u8; 16]);

impl IdentityHash {
    /// Each text is preceded by its length: id `ab` with source `c` differs from id `a` with source `bc`.
    pub(super) fn of(message_id: &str, source: &str) -> Self {
        let mut hash = Sha256::new();
        for text in [message_id, source] {
            // Identities are limited to a few hundred bytes.
            hash.update(u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
            hash.update(text);
        }
        let mut short = [0; 16];
        short.copy_from_slice(&hash.finalize()[..16]);
        Self(short)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_that_are_equal_when_concatenated_are_different() {
        assert_ne!(IdentityHash::of("ab", "c"), IdentityHash::of("a", "bc"));
        assert_ne!(IdentityHash::of("", "a"), IdentityHash::of("a", ""));
    }
}

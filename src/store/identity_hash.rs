//! An identity in 16 bytes, for what outlives its message: the same in the program and in every database.

use sha2::{Digest, Sha256};

/// 16 bytes of SHA-256: enough that nobody finds a second identity for a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IdentityHash(pub(super) [u8; 16]);

impl IdentityHash {
    /// Each behind its length: `ab` of `c` is not `a` of `bc`.
    pub(super) fn of(message_id: &str, source: &str) -> Self {
        let mut hash = Sha256::new();
        for text in [message_id, source] {
            // Identities have a bound of a few hundred bytes.
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
    fn identities_that_read_the_same_run_together_are_two() {
        assert_ne!(IdentityHash::of("ab", "c"), IdentityHash::of("a", "bc"));
        assert_ne!(IdentityHash::of("", "a"), IdentityHash::of("a", ""));
    }
}

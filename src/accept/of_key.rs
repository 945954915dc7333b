//! The decoder of an identity that is in the key of a record: it passes the key to another decoder, as if the key were
//! the payload.

use futures_util::future::BoxFuture;

use crate::types::{Decoder, Encoded, Undecoded};

/// A decoder for payloads, applied to keys.
pub(super) struct OfKey<D>(pub(super) D);

impl<P, D: Decoder<P>> Decoder<P> for OfKey<D> {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<P, Undecoded> {
        self.0.decode(&encoded.of_key())
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        self.0.ready(&encoded.of_key())
    }
}

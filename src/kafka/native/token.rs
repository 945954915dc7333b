//! Sets a client's token for SASL/OAUTHBEARER. rdkafka's own way blocks the polling thread and supports no extensions.

use std::ffi::{CString, c_char};
use std::time::SystemTime;

use rdkafka::bindings::rd_kafka_oauthbearer_set_token;
use rdkafka::client::{Client, ClientContext};
use rdkafka::types::RDKafkaRespErr;

use super::super::token::Token;

/// Sets the token of a client. The error never contains the token; librdkafka's error text might, so it is not used.
pub(in crate::kafka) fn set<C: ClientContext>(client: &Client<C>, token: &Token) -> Result<(), String> {
    let invalid = "the token, its principal or an extension has characters that cannot be sent";
    let text = |text: &str| CString::new(text).map_err(|_| invalid.to_owned());
    let (value, principal) = (text(&token.value)?, text(&token.principal)?);
    let pairs = token.extensions.iter().flat_map(|(name, value)| [name, value]);
    let extensions: Vec<CString> = pairs.map(|part| text(part)).collect::<Result<_, _>>()?;
    let mut pointers: Vec<*const c_char> = extensions.iter().map(|part| part.as_ptr()).collect();
    let ends_at = token.ends_at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // librdkafka multiplies the milliseconds by 1,000, which must not overflow.
    let ends_at_ms = i64::try_from(ends_at.as_millis()).unwrap_or(i64::MAX).min(i64::MAX / 1_000);
    let mut said = [0; 256];
    // SAFETY: the client lives while it is borrowed. The texts end with a NUL and live until the end of this function;
    // librdkafka copies them. The number of pointers and the size of the error buffer are passed correctly.
    let answer = unsafe {
        rd_kafka_oauthbearer_set_token(
            client.native_ptr(),
            value.as_ptr(),
            ends_at_ms,
            principal.as_ptr(),
            pointers.as_mut_ptr(),
            pointers.len(),
            said.as_mut_ptr(),
            said.len(),
        )
    };
    match answer {
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(()),
        RDKafkaRespErr::RD_KAFKA_RESP_ERR__NOT_IMPLEMENTED => {
            Err("this build cannot authenticate with tokens: enable the feature ssl".to_owned())
        }
        RDKafkaRespErr::RD_KAFKA_RESP_ERR__STATE => Err("sasl.mechanism is not OAUTHBEARER".to_owned()),
        _ if token.ends_at <= SystemTime::now() => Err("the token has expired already".to_owned()),
        _ => Err(invalid.to_owned()),
    }
}

//! Adds access control entries to a broker with an authorizer, as the anonymous user of the tests.
//!
//! It sends one request in Kafka's wire protocol (CreateAcls, version 1), because rdkafka cannot. [`ACL_SETTINGS`] are
//! the settings of a broker with an authorizer.

use crate::kafka::Kafka;
use crate::kafka_wire::{exchange, short_text};

/// The settings of a broker that allows only what is granted. Test helpers on the plain listener may do everything.
pub const ACL_SETTINGS: [(&str, &str); 2] = [
    ("authorizer.class.name", "org.apache.kafka.metadata.authorizer.StandardAuthorizer"),
    ("super.users", "User:ANONYMOUS;User:admin"),
];

const CREATE_ACLS: i16 = 30;
const CREATE_ACLS_VERSION: i16 = 1;
const LITERAL: i8 = 3;
const ALLOW: i8 = 3;

/// The resource of a grant.
#[derive(Clone, Copy, Debug)]
pub enum Resource<'a> {
    Topic(&'a str),
    Group(&'a str),
}

/// The operation that a grant allows. The numbers are Kafka's.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    Read = 3,
    Describe = 8,
}

impl Kafka {
    /// Allows the user this operation on the resource, from any host.
    pub async fn grant(&self, user: &str, operation: Operation, resource: Resource<'_>) {
        let (kind, name) = match resource {
            Resource::Topic(name) => (2_i8, name),
            Resource::Group(name) => (3_i8, name),
        };
        let mut request = Vec::new();
        request.extend(CREATE_ACLS.to_be_bytes());
        request.extend(CREATE_ACLS_VERSION.to_be_bytes());
        request.extend(0_i32.to_be_bytes());
        request.extend(short_text("wharf-test"));
        // One entry.
        request.extend(1_i32.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(short_text(name));
        request.extend(LITERAL.to_be_bytes());
        request.extend(short_text(&format!("User:{user}")));
        request.extend(short_text("*"));
        request.extend((operation as i8).to_be_bytes());
        request.extend(ALLOW.to_be_bytes());
        let brokers = self.brokers().to_owned();
        let answer =
            tokio::task::spawn_blocking(move || exchange(&brokers, &request)).await.expect("the broker answers");
        // The error code follows the correlation id, the throttle time and the number of results.
        let error = answer[4 + 4 + 4..].first_chunk().map(|code| i16::from_be_bytes(*code));
        assert_eq!(error, Some(0), "the broker refused the grant");
    }
}

//! Topics: what a handler is subscribed to, and a policy is for.

/// The topic or topics of a subscription.
#[derive(Debug, Clone)]
pub struct Topics(pub(crate) Vec<String>);

impl From<&str> for Topics {
    fn from(topic: &str) -> Self {
        Self(vec![topic.to_owned()])
    }
}

impl From<String> for Topics {
    fn from(topic: String) -> Self {
        Self(vec![topic])
    }
}

impl<const N: usize> From<[&str; N]> for Topics {
    fn from(topics: [&str; N]) -> Self {
        Self(topics.into_iter().map(str::to_owned).collect())
    }
}

impl From<Vec<String>> for Topics {
    fn from(topics: Vec<String>) -> Self {
        Self(topics)
    }
}

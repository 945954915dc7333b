//! The topics of a subscription, an identity policy or a decoder.

use crate::types::TopicFilter;

/// One or several topics, by name or by pattern. Made from a string, an array or a vector by
/// [`InboxBuilder::subscribe`](crate::InboxBuilder::subscribe),
/// [`InboxBuilder::identity`](crate::InboxBuilder::identity) and
/// [`InboxBuilder::decoded_by`](crate::InboxBuilder::decoded_by).
///
/// ```
/// use wharf::Topics;
///
/// let one = Topics::from("orders");
/// let several = Topics::from(["orders", "returns"]);
/// let pattern = Topics::from(r"^orders\..*"); // every topic whose name matches, also later ones
/// ```
#[derive(Debug, Clone)]
pub struct Topics(pub(crate) Vec<String>);

impl Topics {
    /// Returns the parsed topics. `build()` refuses topics that do not parse.
    pub(crate) fn filters(&self) -> Vec<TopicFilter> {
        self.0.iter().filter_map(|topic| TopicFilter::parse(topic).ok()).collect()
    }
}

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

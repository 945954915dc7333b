//! Which decoders each handler uses, and which of them `build()` refuses.

use crate::handler::{Registration, TopicDecoder};
use crate::store::Backend;
use crate::types::TopicFilter;

/// The decoders that a handler uses: its own, or those of its topics that produce its payload type.
pub(super) fn decoders_of<B: Backend>(registration: &Registration<B>, of_topics: &[TopicDecoder]) -> Vec<TopicDecoder> {
    match &registration.decoder {
        Some(decoder) => vec![TopicDecoder { topics: None, decoder: decoder.clone() }],
        None => of_topics.iter().filter(|decoder| uses(registration, decoder)).cloned().collect(),
    }
}

/// Returns every problem of the decoders.
pub(super) fn decoder_problems<B: Backend>(
    registrations: &[Registration<B>],
    of_topics: &[TopicDecoder],
) -> Vec<String> {
    let mut problems = Vec::new();
    for registration in registrations {
        let (key, takes) = (&registration.key, registration.body.decoding().takes());
        if let Some(makes) = registration.decoder.as_ref().map(|decoder| decoder.makes())
            && makes != takes
        {
            problems.push(format!("the decoder of {key} produces {makes}, but the handler takes {takes}"));
        }
        if registration.decoder.is_some() || takes.is_raw() {
            continue;
        }
        for topic in &registration.topics {
            let mut for_topic = of_topics.iter().filter(|decoder| is_for(decoder, topic)).peekable();
            if for_topic.peek().is_some() && for_topic.all(|decoder| decoder.decoder.makes() != takes) {
                problems.push(format!("{key} takes {takes}, but no decoder of the topic {topic:?} produces it"));
            }
        }
    }
    for decoder in of_topics {
        for topic in decoder.topics.iter().flat_map(|topics| &topics.0) {
            if let Err(problem) = TopicFilter::parse(topic) {
                problems.push(format!("the decoder of {topic:?}: {problem}"));
            }
        }
        if !registrations.iter().any(|registration| uses(registration, decoder)) {
            let topics = decoder.topics.iter().flat_map(|topics| &topics.0).map(|topic| format!("{topic:?}"));
            let topics: Vec<String> = topics.collect();
            let makes = decoder.decoder.makes();
            problems.push(format!("no handler uses the decoder of {} that produces {makes}", topics.join(", ")));
        }
    }
    problems
}

/// Whether the handler decodes messages of one of its topics with this decoder.
fn uses<B: Backend>(registration: &Registration<B>, decoder: &TopicDecoder) -> bool {
    registration.decoder.is_none()
        && registration.body.decoding().takes() == decoder.decoder.makes()
        && registration.topics.iter().any(|topic| is_for(decoder, topic))
}

/// Whether the decoder may be for a topic that this subscription, a name or a pattern, matches.
fn is_for(decoder: &TopicDecoder, topic: &str) -> bool {
    let Ok(topic) = TopicFilter::parse(topic) else { return false };
    let may_meet = |filter: &TopicFilter| match (filter.name(), topic.name()) {
        (_, Some(name)) => filter.matches(name),
        (Some(name), None) => topic.matches(name),
        // Whether two patterns match a common topic is not decided, so it is assumed.
        (None, None) => true,
    };
    decoder.topics.as_ref().is_none_or(|topics| topics.filters().iter().any(may_meet))
}

//! What a batch handler answers: once for all messages of a call, or for each of them.

use super::failure::Failure;

/// What a batch handler answers: once for all messages of the call, or for each of them in their order.
///
/// `Result<(), E>` is one answer for all. `Vec<Result<(), E>>` has an answer for each message. `Result<Vec<Result<(), E>>, E>` is either:
/// `?` fails the whole call.
///
/// A call that fails as a whole charges nothing as long as it had several messages: each half of them is handled by a call of its own, and
/// so on. Only the answer to a call with one message is that message's own. So one bad message among 64 costs twelve more calls, and no
/// other message is charged. A number of answers that is not the number of messages fails the call as a whole.
///
/// To treat all messages alike without halves, for example while the service behind the handler is away, answer for each:
///
/// ```
/// use std::time::Duration;
/// use wharf::batch::Answers;
/// use wharf::{Failure, Message, Raw};
///
/// async fn index(orders: Vec<Message<Raw>>) -> Answers {
///     # let is_away = true;
///     if is_away {
///         return Answers::each(vec![Err(Failure::snooze(Duration::from_secs(30))); orders.len()]);
///     }
///     Answers::all(Ok(()))
/// }
/// ```
#[derive(Debug)]
#[must_use = "answers count only when the handler returns them"]
pub struct Answers(Given);

#[derive(Debug)]
enum Given {
    All(Result<(), Failure>),
    Each(Vec<Result<(), Failure>>),
}

impl Answers {
    /// One answer for all messages.
    pub fn all(answer: Result<(), Failure>) -> Self {
        Self(Given::All(answer))
    }

    /// An answer for each message, in the order of the messages.
    pub fn each(answers: impl IntoIterator<Item = Result<(), Failure>>) -> Self {
        Self(Given::Each(answers.into_iter().collect()))
    }

    /// What this means for a call with so many messages.
    pub(super) fn to(self, messages: usize) -> Answered {
        match self.0 {
            Given::All(Ok(())) => Answered::Each((0..messages).map(|_| Ok(())).collect()),
            Given::All(Err(failure)) => Answered::Whole(failure),
            Given::Each(answers) if answers.len() == messages => Answered::Each(answers),
            Given::Each(answers) => {
                let error = format!(
                    "the batch handler returned a wrong number of answers: {} for a batch of {messages}",
                    answers.len()
                );
                Answered::Whole(Failure::retry(error))
            }
        }
    }
}

impl<E: Into<Failure>> From<Result<(), E>> for Answers {
    fn from(answer: Result<(), E>) -> Self {
        Self::all(answer.map_err(Into::into))
    }
}

impl<E: Into<Failure>> From<Vec<Result<(), E>>> for Answers {
    fn from(answers: Vec<Result<(), E>>) -> Self {
        Self::each(answers.into_iter().map(|answer| answer.map_err(Into::into)))
    }
}

impl<E: Into<Failure>, F: Into<Failure>> From<Result<Vec<Result<(), E>>, F>> for Answers {
    fn from(answers: Result<Vec<Result<(), E>>, F>) -> Self {
        match answers {
            Ok(answers) => answers.into(),
            Err(failure) => Self::all(Err(failure.into())),
        }
    }
}

/// What a call came to.
#[derive(Debug)]
pub(crate) enum Answered {
    /// One a message, in the order of the batch.
    Each(Vec<Result<(), Failure>>),
    /// The call failed as a whole.
    Whole(Failure),
}

impl Answered {
    /// The answer for the only message.
    pub(super) fn only(self) -> Result<(), Failure> {
        match self {
            Self::Each(answers) => answers.into_iter().collect(),
            Self::Whole(failure) => Err(failure),
        }
    }

    /// Puts in the answers for messages that the handler was not handed, lowest place first.
    pub(super) fn with(self, undecodable: Vec<(usize, Failure)>) -> Self {
        match self {
            Self::Whole(failure) => Self::Whole(failure),
            Self::Each(mut answers) => {
                for (place, failure) in undecodable {
                    answers.insert(place, Err(failure));
                }
                Self::Each(answers)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(answers: impl Into<Answers>, messages: usize) -> Result<Vec<bool>, String> {
        match answers.into().to(messages) {
            Answered::Each(answers) => Ok(answers.iter().map(Result::is_ok).collect()),
            Answered::Whole(failure) => Err(failure.error),
        }
    }

    #[test]
    fn answers_are_for_all_or_for_each_in_any_form_that_a_handler_may_return() {
        assert_eq!(said(Ok::<(), Failure>(()), 3), Ok(vec![true; 3]));
        assert_eq!(said(Err::<(), _>("no"), 3), Err("no".to_owned()));
        assert_eq!(said(vec![Ok(()), Err(std::fmt::Error)], 2), Ok(vec![true, false]));
        assert_eq!(said(Ok::<_, Failure>(vec![Err("no"), Ok(())]), 2), Ok(vec![false, true]));
        assert_eq!(said(Err::<Vec<Result<(), Failure>>, _>("no"), 2), Err("no".to_owned()));
    }

    #[test]
    fn a_wrong_number_of_answers_is_a_failure_of_the_whole_that_names_it() {
        let none: Vec<Result<(), Failure>> = Vec::new();
        assert_eq!(
            said(none, 2),
            Err("the batch handler returned a wrong number of answers: 0 for a batch of 2".to_owned())
        );
        assert_eq!(
            said(vec![Ok::<(), Failure>(()); 3], 2),
            Err("the batch handler returned a wrong number of answers: 3 for a batch of 2".to_owned())
        );
    }

    #[test]
    fn answers_for_what_could_not_be_decoded_stand_in_their_places() {
        let undecodable = |place| (place, Failure::undecodable(String::new()));
        let answered = Answered::Each(vec![Ok(()), Ok(())]).with(vec![undecodable(0), undecodable(2), undecodable(4)]);
        let Answered::Each(answers) = answered else { panic!("{answered:?}") };
        assert_eq!(answers.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true, false, true, false]);
    }
}

//! The answers of a batch handler: one for all messages of a call, or one for each of them.

use super::failure::Failure;

/// The answers of a batch handler: one for all messages of the call, or one for each of them in their order.
///
/// A handler usually returns a type that converts into `Answers`: `Result<(), E>` is one answer for all,
/// `Vec<Result<(), E>>` has an answer for each message, and `Result<Vec<Result<(), E>>, E>` is either, so that `?`
/// fails the whole call.
///
/// A call that fails as a whole consumes no retry while it has several messages: each half of them gets a call of its
/// own, and so on. Only the answer to a call with one message counts for that message. So one bad message among 64
/// costs twelve more calls, and no other message consumes a retry. If the number of answers is not the number of
/// messages, the call fails as a whole.
///
/// To treat all messages alike without further calls, answer for each. (One [`Failure::unavailable`] for all counts for
/// each at once, too.)
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
#[must_use = "return these answers from the handler"]
pub struct Answers(Given);

/// The returned value. How it applies depends on the number of messages, which only the caller has.
#[derive(Debug)]
enum Given {
    All(Result<(), Failure>),
    Each(Vec<Result<(), Failure>>),
}

impl Answers {
    /// Returns one answer for all messages.
    ///
    /// ```
    /// let done = wharf::batch::Answers::all(Ok(()));
    /// ```
    pub fn all(answer: Result<(), Failure>) -> Self {
        Self(Given::All(answer))
    }

    /// Returns an answer for each message, in the order of the messages.
    ///
    /// ```
    /// use wharf::Failure;
    /// use wharf::batch::Answers;
    ///
    /// let second_failed = Answers::each([Ok(()), Err(Failure::retry("locked")), Ok(())]);
    /// ```
    pub fn each(answers: impl IntoIterator<Item = Result<(), Failure>>) -> Self {
        Self(Given::Each(answers.into_iter().collect()))
    }

    /// Applies the answers to a call with this many messages.
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

/// The result of a call, after its answers were matched with its messages.
#[derive(Debug)]
pub(crate) enum Answered {
    /// An answer for each message, in the order of the batch.
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

    /// Inserts the failures of messages that the handler did not get, which are sorted by their place.
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
    fn answers_for_all_and_for_each_are_accepted_in_every_form() {
        assert_eq!(said(Ok::<(), Failure>(()), 3), Ok(vec![true; 3]));
        assert_eq!(said(Err::<(), _>("no"), 3), Err("no".to_owned()));
        assert_eq!(said(vec![Ok(()), Err(std::fmt::Error)], 2), Ok(vec![true, false]));
        assert_eq!(said(Ok::<_, Failure>(vec![Err("no"), Ok(())]), 2), Ok(vec![false, true]));
        assert_eq!(said(Err::<Vec<Result<(), Failure>>, _>("no"), 2), Err("no".to_owned()));
    }

    #[test]
    fn a_wrong_number_of_answers_fails_the_call_and_names_the_numbers() {
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
    fn answers_for_undecodable_payloads_keep_their_places() {
        let undecodable = |place| (place, Failure::undecodable(String::new()));
        let answered = Answered::Each(vec![Ok(()), Ok(())]).with(vec![undecodable(0), undecodable(2), undecodable(4)]);
        let Answered::Each(answers) = answered else { panic!("{answered:?}") };
        assert_eq!(answers.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true, false, true, false]);
    }
}

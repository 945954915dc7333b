//! Options that say how fast and when a handler's deliveries may start.

use super::breaker::Breaker;
use super::registration::Registration;
use crate::store::Backend;
use crate::types::DURATION_MAX;

/// What a registration says about it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Flow {
    pub(crate) breaker: Option<Breaker>,
}

impl<B: Backend> Registration<B> {
    /// Stops this handler's deliveries while what it depends on is away, in all processes, and lets one at a time probe whether it is back.
    /// See [`Breaker`] for what counts. An outage consumes no retry and poisons nothing. A person can open and close the breaker
    /// (`wharf handlers open-breaker KEY`), whether or not the handler has this option. Default: none; a failure that says
    /// [`Failure::unavailable`](crate::Failure::unavailable) is then retried like any other.
    ///
    /// ```
    /// use wharf::flow::Breaker;
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    ///
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    ///     match std::net::TcpStream::connect("mail.example:25") {
    ///         Err(error) => Err(Failure::unavailable(error)),
    ///         Ok(_) => Ok(()),
    ///     }
    /// }
    ///
    /// let registration: Registration<Postgres> =
    ///     handler(HandlerKey::new("mail.receipt"), send_receipt).breaker(Breaker::new());
    /// ```
    pub fn breaker(mut self, breaker: Breaker) -> Self {
        self.flow.breaker = Some(breaker);
        self
    }

    /// What cannot work of these options.
    pub(crate) fn flow_problems(&self) -> Vec<String> {
        let key = &self.key;
        let mut problems = Vec::new();
        if self.flow.breaker.as_ref().is_some_and(|breaker| breaker.failures == 0) {
            problems.push(format!("the breaker of {key} opens after at least one failure"));
        }
        let is_no_interval = |breaker: &Breaker| breaker.probe_every.is_zero() || breaker.probe_every > DURATION_MAX;
        if self.flow.breaker.as_ref().is_some_and(is_no_interval) {
            problems.push(format!("the breaker of {key} probes after more than zero and at most 365days"));
        }
        problems
    }
}

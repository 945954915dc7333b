//! Options that say how fast and when a handler's deliveries may start.

use super::breaker::Breaker;
use super::rate::RateLimit;
use super::registration::Registration;
use crate::store::Backend;
use crate::types::DURATION_MAX;

/// What a registration says about it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Flow {
    pub(crate) breaker: Option<Breaker>,
    /// Over all processes.
    pub(crate) rate: Option<RateLimit>,
    pub(crate) rate_per_process: Option<RateLimit>,
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

    /// At most so many deliveries of this handler start in a time, over all processes: the limit stands in the database, and each claim takes from
    /// it. Retries, replays and probes count too. A person can change it while processes run (`wharf handlers rate KEY`, `inbox_set_rate`); what a
    /// person has set stays over restarts and deploys until it is taken back. Default: no limit.
    ///
    /// Deliveries of such a handler are claimed, never handed over from memory, and none is claimed ahead.
    ///
    /// ```
    /// use wharf::flow::RateLimit;
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// // The mail service takes fifty a second from us, however many processes we are.
    /// let registration: Registration<Postgres> =
    ///     handler(HandlerKey::new("mail.receipt"), send_receipt).rate(RateLimit::per_second(50));
    /// ```
    pub fn rate(mut self, limit: RateLimit) -> Self {
        self.flow.rate = Some(limit);
        self
    }

    /// At most so many deliveries of this handler start in a time in this process: claims and hand-over obey. It costs no statement. Can be combined
    /// with [`Registration::rate`]. Default: no limit.
    ///
    /// ```
    /// use wharf::flow::RateLimit;
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn resize(image: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// let registration: Registration<Postgres> =
    ///     handler(HandlerKey::new("image.resize"), resize).rate_per_process(RateLimit::per_second(5).burst(1));
    /// ```
    pub fn rate_per_process(mut self, limit: RateLimit) -> Self {
        self.flow.rate_per_process = Some(limit);
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
        let limits = [self.flow.rate, self.flow.rate_per_process].into_iter().flatten();
        problems
            .extend(limits.filter_map(|limit| limit.problem()).map(|what| format!("the rate limit of {key} {what}")));
        problems
    }
}

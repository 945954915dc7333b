//! What people do about the flow of a handler's deliveries: pause it, open or close its breaker, set its rate limit.

use super::Operator;
use crate::handler::RateLimit;
use crate::store::Backend;
use crate::store::operating::{Act, RateSetting};
use crate::types::{Error, Result};

impl<B: Backend> Operator<B> {
    /// Nobody claims the handler's deliveries any more, in any process, within a third of the lease. What runs goes on to its end.
    /// Returns whether it was not paused before.
    ///
    /// # Errors
    /// When there is no such handler, or the database does not answer.
    pub async fn pause(&self, handler_key: &str) -> Result<bool> {
        self.check_key(Some(handler_key)).await?;
        Ok(self.act(Act::Pause { handler_key: handler_key.to_owned() }).await? > 0)
    }

    /// The handler's deliveries are claimed again. Returns whether it was paused before.
    ///
    /// # Errors
    /// As [`Operator::pause`].
    pub async fn resume(&self, handler_key: &str) -> Result<bool> {
        self.check_key(Some(handler_key)).await?;
        Ok(self.act(Act::Resume { handler_key: handler_key.to_owned() }).await? > 0)
    }

    /// Opens the handler's breaker, also of one that was registered without: nobody claims its deliveries any more, except for one at a time that
    /// probes, the first after ten seconds. A probe that succeeds closes it; to stop the handler whatever happens, use [`Operator::pause`].
    /// Hand-over stops within a third of the lease. Returns whether it was closed before.
    ///
    /// ```no_run
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let operator = store.operate().acting_as("alice").because("the mail server is going down");
    /// operator.open_breaker("mail.receipt").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::pause`].
    pub async fn open_breaker(&self, handler_key: &str) -> Result<bool> {
        self.check_key(Some(handler_key)).await?;
        Ok(self.act(Act::OpenBreaker { handler_key: handler_key.to_owned() }).await? > 0)
    }

    /// Closes the handler's breaker without waiting for a probe. Processes go on within their poll interval. Returns whether it was open before.
    ///
    /// # Errors
    /// As [`Operator::pause`].
    pub async fn close_breaker(&self, handler_key: &str) -> Result<bool> {
        self.check_key(Some(handler_key)).await?;
        Ok(self.act(Act::CloseBreaker { handler_key: handler_key.to_owned() }).await? > 0)
    }

    /// Sets how many deliveries of the handler start in a time, over all processes, whatever its registration says, until it is taken back with
    /// [`Operator::reset_rate`]. A change of a limit counts at once; a handler that had none has it within a third of the lease. Returns
    /// whether that changes anything.
    ///
    /// ```no_run
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::flow::RateLimit;
    /// let operator = store.operate().acting_as("alice").because("the mail service asks us to slow down");
    /// operator.limit_rate("mail.receipt", RateLimit::per_second(5)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the limit cannot be used; and as [`Operator::pause`].
    pub async fn limit_rate(&self, handler_key: &str, limit: RateLimit) -> Result<bool> {
        if let Some(problem) = limit.problem() {
            return Err(Error::configuration(format!("a rate limit {problem}")));
        }
        let burst = i32::try_from(limit.burst).unwrap_or(i32::MAX);
        self.set_rate(handler_key, RateSetting::Limit { interval_us: limit.interval_us(), burst }).await
    }

    /// Takes the handler's rate limit away, whatever its registration says, until [`Operator::reset_rate`]. Returns whether that changes anything.
    ///
    /// # Errors
    /// As [`Operator::pause`].
    pub async fn lift_rate(&self, handler_key: &str) -> Result<bool> {
        self.set_rate(handler_key, RateSetting::Unlimited).await
    }

    /// The handler's rate limit is what its registration says. Returns whether that changes anything.
    ///
    /// # Errors
    /// As [`Operator::pause`].
    pub async fn reset_rate(&self, handler_key: &str) -> Result<bool> {
        self.set_rate(handler_key, RateSetting::AsRegistered).await
    }

    async fn set_rate(&self, handler_key: &str, rate: RateSetting) -> Result<bool> {
        self.check_key(Some(handler_key)).await?;
        Ok(self.act(Act::SetRate { handler_key: handler_key.to_owned(), rate }).await? > 0)
    }
}

//! Operator actions on the flow of a handler: pause or resume it, open or close its breaker, set its rate limit.

use super::Operator;
use crate::handler::RateLimit;
use crate::store::Backend;
use crate::store::operating::{Act, RateSetting};
use crate::types::{Error, Result};

impl<B: Backend> Operator<B> {
    /// Pauses the handler in all processes: within a third of the lease, none claims its deliveries any more. Runs
    /// in progress finish. Returns false when it was paused already.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let operator = store.operate().acting_as("alice").because("the mail server is down");
    /// operator.pause("mail.receipt").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When there is no such handler, or the database does not answer.
    pub async fn pause(&self, handler_key: &str) -> Result<bool> {
        self.check_key(Some(handler_key)).await?;
        Ok(self.act(Act::Pause { handler_key: handler_key.to_owned() }).await? > 0)
    }

    /// Resumes a paused handler: processes claim its deliveries again. Returns false when it was not paused.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// store.operate().acting_as("alice").because("the mail server is back").resume("mail.receipt").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::pause`].
    pub async fn resume(&self, handler_key: &str) -> Result<bool> {
        self.check_key(Some(handler_key)).await?;
        Ok(self.act(Act::Resume { handler_key: handler_key.to_owned() }).await? > 0)
    }

    /// Opens the handler's breaker, also when the handler is registered without one. Its deliveries are no longer
    /// claimed, except for one at a time as a probe, the first after ten seconds. A successful probe closes the
    /// breaker; to stop the handler unconditionally, use [`Operator::pause`]. Hand-over from memory stops within a
    /// third of the lease. Returns false when the breaker was open already.
    ///
    /// ```
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

    /// Closes the handler's breaker without waiting for a probe. Processes resume within their poll interval. Returns
    /// false when it was closed already.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// store.operate().acting_as("alice").because("the mail server is back").close_breaker("mail.receipt").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::pause`].
    pub async fn close_breaker(&self, handler_key: &str) -> Result<bool> {
        self.check_key(Some(handler_key)).await?;
        Ok(self.act(Act::CloseBreaker { handler_key: handler_key.to_owned() }).await? > 0)
    }

    /// Overrides the handler's registered rate limit, over all processes, until [`Operator::reset_rate`]. A change of
    /// an existing limit applies at once; a handler that had none is limited within a third of the lease. Returns
    /// whether anything changed.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::flow::RateLimit;
    /// let operator = store.operate().acting_as("alice").because("the mail service asks us to slow down");
    /// operator.limit_rate("mail.receipt", RateLimit::per_second(5)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the limit is invalid; and as [`Operator::pause`].
    pub async fn limit_rate(&self, handler_key: &str, limit: RateLimit) -> Result<bool> {
        if let Some(problem) = limit.problem() {
            return Err(Error::configuration(format!("a rate limit {problem}")));
        }
        let burst = i32::try_from(limit.burst).unwrap_or(i32::MAX);
        self.set_rate(handler_key, RateSetting::Limit { interval_us: limit.interval_us(), burst }).await
    }

    /// Removes the handler's rate limit, also a registered one, until [`Operator::reset_rate`]. Returns whether
    /// anything changed.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// store.operate().acting_as("alice").because("catch up over night").lift_rate("mail.receipt").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::pause`].
    pub async fn lift_rate(&self, handler_key: &str) -> Result<bool> {
        self.set_rate(handler_key, RateSetting::Unlimited).await
    }

    /// Restores the rate limit of the handler's registration. Returns whether anything changed.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// store.operate().acting_as("alice").because("the backlog is gone").reset_rate("mail.receipt").await?;
    /// # Ok(()) }
    /// ```
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

//! What people do about the flow of a handler's deliveries: pause it, and open or close its breaker.

use super::Operator;
use crate::store::Backend;
use crate::store::operating::Act;
use crate::types::Result;

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
}

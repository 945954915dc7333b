//! Who acts and why: each action of an operator writes both to `inbox_audit`.

use super::operator::Operator;
use crate::store::Backend;

impl<B: Backend> Operator<B> {
    /// Sets the name of the person who acts, for the audit. The PostgreSQL user is recorded too (`database_user`).
    /// Default: none.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// store.operate().acting_as("alice").pause("mail.receipt").await?;
    /// # Ok(()) }
    /// ```
    pub fn acting_as(mut self, actor: impl Into<String>) -> Self {
        self.signed.actor = Some(actor.into());
        self
    }

    /// Sets the reason for the actions, for the audit. Default: none.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let operator = store.operate().acting_as("alice").because("the mail server is down until noon");
    /// operator.pause("mail.receipt").await?;
    /// # Ok(()) }
    /// ```
    pub fn because(mut self, because: impl Into<String>) -> Self {
        self.signed.because = Some(because.into());
        self
    }
}

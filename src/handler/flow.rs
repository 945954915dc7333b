//! Options that decide when deliveries of a handler may start: breaker, rate limits, fairness, priority.

use super::breaker::Breaker;
use super::fair::FairKey;
use super::priority::Priority;
use super::rate::RateLimit;
use super::registration::Registration;
use crate::store::Backend;
use crate::types::DURATION_MAX;

/// These options of a registration.
#[derive(Debug, Clone, Default)]
pub(crate) struct Flow {
    pub(crate) breaker: Option<Breaker>,
    /// Over all processes.
    pub(crate) rate: Option<RateLimit>,
    /// In each process.
    pub(crate) rate_per_process: Option<RateLimit>,
    pub(crate) fair: Option<FairKey>,
    pub(crate) priority: Priority,
}

impl<B: Backend> Registration<B> {
    /// Stops this handler in all processes while a dependency of it is unavailable, and lets one delivery at a time
    /// probe whether the dependency is available again. [`Breaker`] describes which failures count. An outage consumes
    /// no retry and poisons nothing. If only some deliveries fail like this while others succeed, their retry policy
    /// decides in the end, as without a breaker. A person can open and close the breaker (`wharf handlers open-breaker
    /// KEY`), also without this option. Default: none; [`Failure::unavailable`](crate::Failure::unavailable) is then
    /// retried like any other failure. Set it for handlers that call a service which may be down for longer than the
    /// retries last.
    ///
    /// ```
    /// # use wharf::{HandlerKey, Postgres, Registration, handler};
    /// use wharf::flow::Breaker;
    /// use wharf::{Failure, Message, Raw};
    ///
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    ///     match std::net::TcpStream::connect("mail.example:25") {
    ///         Err(error) => Err(Failure::unavailable(error)),
    ///         Ok(_) => Ok(()),
    ///     }
    /// }
    ///
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.receipt"), send_receipt).breaker(Breaker::new())
    /// # ;
    /// ```
    pub fn breaker(mut self, breaker: Breaker) -> Self {
        self.flow.breaker = Some(breaker);
        self
    }

    /// Limits how many deliveries of this handler start per time in all processes together. The limit is stored in the
    /// database, and each claim takes from it. Retries, replays and probes count too. A person can change it at run
    /// time (`wharf handlers rate KEY`, `inbox_set_rate`); such a change survives restarts and deploys until it is
    /// reset. Default: no limit. Set it when the service behind the handler has a quota.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::flow::RateLimit;
    ///
    /// // The mail service allows us 50 requests per second, from all processes together.
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.receipt"), send_receipt).rate(RateLimit::per_second(50))
    /// # ;
    /// ```
    ///
    /// Deliveries of such a handler are claimed in the database: none is handed over from memory, and none is claimed
    /// ahead.
    pub fn rate(mut self, limit: RateLimit) -> Self {
        self.flow.rate = Some(limit);
        self
    }

    /// Limits how many deliveries of this handler start per time in each process, whether they are claimed or handed
    /// over from memory. It needs no SQL statement. It can be combined with [`Registration::rate`]. Default: no limit.
    /// Set it when the resource that the handler uses belongs to the process, such as its CPU.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn resize(image: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::flow::RateLimit;
    ///
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("image.resize"), resize).rate_per_process(RateLimit::per_second(5).burst(1))
    /// # ;
    /// ```
    pub fn rate_per_process(mut self, limit: RateLimit) -> Self {
        self.flow.rate_per_process = Some(limit);
        self
    }

    /// Lets tenants take turns: each claim takes an equal share from every tenant that has due deliveries, and the next
    /// claim continues with the tenants after these. So a burst of one tenant does not delay the others. With `t`
    /// tenants that have due deliveries and claims of `n` deliveries, each tenant has its turn within `t / n` claims,
    /// rounded up. A tenant that is alone gets everything. Default: no tenants; the delivery that has been due longest
    /// runs first.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn send_mail(mail: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::flow::FairKey;
    ///
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.send"), send_mail).fair_by(FairKey::json_pointer("/tenant/id"))
    /// # ;
    /// ```
    ///
    /// Deliveries of such a handler are claimed in the database and never handed over from memory. Deliveries that are
    /// claimed ahead ([`Limits::claim_ahead`](crate::Limits::claim_ahead)) run before a tenant that comes later. Each
    /// process takes turns on its own. Within a tenant, the delivery that has been due longest runs first. A handler
    /// cannot be both ordered and fair; `build()` refuses it.
    ///
    /// Deliveries that were stored before the handler was fair take turns together, like one tenant, while they are
    /// among the oldest due deliveries.
    pub fn fair_by(mut self, key: FairKey) -> Self {
        self.flow.fair = Some(key);
        self
    }

    /// Sets the priority of a transactional handler for the database connections that transactional handlers of a
    /// process share. Half of these connections are reserved, in the proportion 4 : 2 : 1 for high, normal and low
    /// priority, and at least one for each handler if there are enough connections. The other half is for every
    /// handler: when several wait for a connection, those with higher priority get it first, except every fourth time.
    /// So every handler makes progress. Default: [`Priority::Normal`].
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, tx_handler};
    /// # use diesel_async::AsyncPgConnection;
    /// # async fn book(order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> { Ok(()) }
    /// # async fn count(order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> { Ok(()) }
    /// use wharf::flow::Priority;
    ///
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox
    ///     .subscribe("orders", tx_handler(HandlerKey::new("books.order"), book).priority(Priority::High))
    ///     .subscribe("orders", tx_handler(HandlerKey::new("statistics"), count).priority(Priority::Low))
    /// # }
    /// ```
    ///
    /// It has no effect on other handlers: each of them has its own [`concurrency`](Registration::concurrency) and
    /// shares no limit. It does not interrupt running handlers, and it does not apply across processes.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.flow.priority = priority;
        self
    }

    /// Returns the problems of these options.
    pub(crate) fn flow_problems(&self) -> Vec<String> {
        let key = &self.key;
        let mut problems = Vec::new();
        if self.flow.breaker.as_ref().is_some_and(|breaker| breaker.failures == 0) {
            problems.push(format!("the breaker of {key} must have at least one failure"));
        }
        let is_no_interval = |breaker: &Breaker| breaker.probe_every.is_zero() || breaker.probe_every > DURATION_MAX;
        if self.flow.breaker.as_ref().is_some_and(is_no_interval) {
            problems
                .push(format!("the probe interval of the breaker of {key} must be more than zero and at most 365days"));
        }
        let limits = [self.flow.rate, self.flow.rate_per_process].into_iter().flatten();
        problems
            .extend(limits.filter_map(|limit| limit.problem()).map(|what| format!("the rate limit of {key} {what}")));
        if self.flow.fair.is_some() && self.order.is_some() {
            problems.push(format!("{key} is ordered: it cannot be fair as well"));
        }
        problems
    }
}

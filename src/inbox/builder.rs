//! Builds an inbox and refuses one that could not work, naming every reason at once.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::OnceCell;

use super::{Inbox, Shared};
use crate::accept::{Acceptor, Identity, Intake, Rules};
use crate::handler::{Attempt, Body, Failure, HandlerKey, LayerFn, Next, PoisonHook, Poisoned, Registration, Topics};
#[cfg(feature = "kafka")]
use crate::kafka::Relay;
use crate::operate::{Manifest, ManifestHandler, Retention};
use crate::process::Redact;
use crate::store::{Backend, Store};
use crate::types::{DURATION_MAX, Error, Limits, Result};

/// The longest topic name Kafka allows.
const TOPIC_CHARS_MAX: usize = 249;
/// More would not be concurrency but a queue in memory.
const CONCURRENCY_MAX: usize = 100_000;
/// PostgreSQL keeps so many subtransactions of a session at hand. With more of them every other session has to look them up on disk.
const SHARE_MAX: usize = 64;
/// Messages of one call of a batch handler: one that crashes its process is found out with as many calls alone.
const BATCH_MAX: usize = 1_000;
const BATCH_WAIT_MAX: Duration = Duration::from_secs(3_600);

/// An inbox in the making. See [`Inbox::builder`].
#[must_use = "an inbox is made by `build`"]
pub struct InboxBuilder<B: Backend> {
    /// None where only the keys are asked for.
    store: Option<Store<B>>,
    limits: Limits,
    registrations: Vec<Registration<B>>,
    /// Policies as they were given: a topic may stand twice until `build()`.
    identities: Vec<(Topics, Identity)>,
    retention: Option<Retention>,
    hook: Option<PoisonHook>,
    #[cfg(feature = "kafka")]
    relay: Option<Relay>,
    redact: Option<Redact>,
    /// The first is the innermost.
    layers: Vec<Arc<LayerFn>>,
}

impl<B: Backend> InboxBuilder<B> {
    pub(super) fn new(store: Store<B>) -> Self {
        Self { store: Some(store), ..Self::without_store() }
    }

    /// Begins an inbox that cannot be built, for [`InboxBuilder::manifest`]: the keys of a service's handlers, without a database.
    ///
    /// ```
    /// use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, handler};
    ///
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    ///     Ok(())
    /// }
    ///
    /// // Shared by `main`, by tests, and by the check in CI.
    /// fn handlers(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    ///     inbox.subscribe("orders", handler(HandlerKey::new("mail.receipt"), send_receipt).formerly("receipts"))
    /// }
    ///
    /// let manifest = handlers(InboxBuilder::without_store()).manifest();
    /// assert_eq!(manifest.handlers[0].key, "mail.receipt");
    /// ```
    pub fn without_store() -> Self {
        Self {
            store: None,
            limits: Limits::default(),
            registrations: Vec::new(),
            identities: Vec::new(),
            retention: None,
            hook: None,
            #[cfg(feature = "kafka")]
            relay: None,
            redact: None,
            layers: Vec::new(),
        }
    }

    /// Delivers the messages of a topic, or of several (`["orders", "returns"]`), to a handler.
    pub fn subscribe(mut self, topics: impl Into<Topics>, mut registration: Registration<B>) -> Self {
        registration.topics.extend(topics.into().0);
        self.registrations.push(registration);
        self
    }

    /// Where the records of a topic, or of several, carry their identity, and what becomes of those that have none. Once a topic.
    /// Default: [`Identity::cloud_events`], and records without identity are quarantined. An explicit [`Record::with_id`](crate::Record::with_id)
    /// always wins.
    pub fn identity(mut self, topics: impl Into<Topics>, identity: Identity) -> Self {
        self.identities.push((topics.into(), identity));
        self
    }

    /// The bounds the inbox works within. Default: [`Limits::default`].
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Purges what has been finished for long enough, in the background while the inbox is started: a period, or a [`Retention`] for more.
    /// Default: nothing is ever purged.
    pub fn retention(mut self, retention: impl Into<Retention>) -> Self {
        self.retention = Some(retention.into());
        self
    }

    /// Calls an async function for each delivery that is poisoned, whatever poisons it and in whichever process: for alarms. At least once: the call is
    /// written down with the poisoning, and stays until the function has returned without an error, in this process or in another one that has a
    /// function too. A call that fails is made again, after pauses that grow to five minutes; one may take 30 seconds. Default: none.
    ///
    /// ```
    /// # use wharf::{InboxBuilder, Postgres};
    /// # async fn page(_: String) -> Result<(), std::io::Error> { Ok(()) }
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox.on_poison(|poisoned| async move {
    ///     page(format!("{} is poisoned: {}", poisoned.handler_key, poisoned.reason)).await
    /// })
    /// # }
    /// ```
    ///
    /// Deliveries that were poisoned before the first start with a function are not told of.
    pub fn on_poison<F, E>(mut self, hook: impl Fn(Poisoned) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<Failure> + 'static,
    {
        self.hook = Some(PoisonHook::new(hook));
        self
    }

    /// Sends the records of the outbox ([`Outbox`](crate::Outbox)) while the inbox is started. Default: this process sends none; they wait for another one
    /// that does.
    ///
    /// ```
    /// # fn example(builder: wharf::InboxBuilder<wharf::Postgres>) -> wharf::InboxBuilder<wharf::Postgres> {
    /// builder.relay(wharf::kafka::Relay::new("broker-1:9092"))
    /// # }
    /// ```
    #[cfg(feature = "kafka")]
    pub fn relay(mut self, relay: Relay) -> Self {
        self.relay = Some(relay);
        self
    }

    /// Takes out of handlers' errors what must not be kept, before they reach `last_error` or a log. Default: nothing is taken out.
    ///
    /// ```
    /// # fn example(builder: wharf::InboxBuilder<wharf::Postgres>) -> wharf::InboxBuilder<wharf::Postgres> {
    /// builder.redact(|error| error.replace(|character: char| character.is_ascii_digit(), "#"))
    /// # }
    /// ```
    pub fn redact(mut self, redact: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        self.redact = Some(Arc::new(redact));
        self
    }

    #[cfg(feature = "testing")]
    pub(crate) fn get_limits(&self) -> &Limits {
        &self.limits
    }

    /// Puts an async function around each run of every handler, outside of the handlers' own layers and of those given before. See
    /// [`Registration::layer`].
    pub fn layer(
        mut self,
        layer: impl for<'a> Fn(Attempt<'a>, Next<'a>) -> BoxFuture<'a, Result<(), Failure>> + Send + Sync + 'static,
    ) -> Self {
        self.layers.push(Arc::new(layer));
        self
    }

    /// The keys of the handlers so far: what a deploy of this build would mean for what is stored. See [`Manifest::plan`].
    pub fn manifest(&self) -> Manifest {
        let entry = |registration: &Registration<B>| ManifestHandler {
            key: registration.key.as_str().to_owned(),
            formerly: registration.former_keys.clone(),
        };
        Manifest { handlers: self.registrations.iter().map(entry).collect() }
    }

    /// Checks everything and makes the inbox. Touches no database.
    ///
    /// # Errors
    /// When keys or former keys are not allowed or stand twice, a topic, a limit or the retention cannot be used, there is no handler at
    /// all, or an identity policy cannot work, stands twice or is for a topic that nobody subscribes to.
    /// All problems are named in one error.
    pub fn build(mut self) -> Result<Inbox<B>> {
        let manifest = self.manifest();
        let mut problems = self.limits.problems();
        if self.registrations.is_empty() {
            problems.push("an inbox has at least one handler: call subscribe".to_owned());
        }
        problems.extend(self.registrations.iter().flat_map(registration_problems));
        problems.extend(colliding_keys(&self.registrations));
        let subscriptions = self.registrations.iter().map(Registration::subscription).collect();
        let (rules, cannot_work) = Rules::new(subscriptions, self.identities);
        problems.extend(cannot_work);
        problems.extend(self.retention.iter().flat_map(Retention::problems));
        if self.store.is_none() {
            problems.push("it has no store: begin with Inbox::builder(store)".to_owned());
        }
        let Some(store) = self.store.filter(|_| problems.is_empty()) else {
            return Err(Error::configuration(format!("cannot build the inbox: {}", problems.join("; "))));
        };
        for layer in &self.layers {
            self.registrations.iter_mut().for_each(|registration| registration.wrap(Arc::clone(layer)));
        }
        let mut intake = Intake::new(store, self.limits, rules);
        intake.calls_on_poison = self.hook.is_some();
        let intake = Arc::new(intake);
        let shared = Shared {
            manifest,
            acceptor: Acceptor::start(&intake),
            intake,
            registrations: self.registrations,
            redact: self.redact,
            retention: self.retention,
            hook: self.hook,
            #[cfg(feature = "kafka")]
            relay: self.relay,
            lanes: OnceCell::new(),
        };
        Ok(Inbox { shared: Arc::new(shared) })
    }
}

fn registration_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let key = &registration.key;
    let mut problems = Vec::new();
    for former in &registration.former_keys {
        if let Err(error) = HandlerKey::parse(former.clone()) {
            problems.push(format!("a former key of {key}: {error}"));
        }
    }
    for topic in &registration.topics {
        if !is_topic(topic) {
            problems.push(format!("{key} subscribes to {topic:?}: a topic has 1 to 249 of A-Z a-z 0-9 . _ -"));
        }
    }
    if registration.topics.is_empty() {
        problems.push(format!("{key} subscribes to no topic"));
    }
    if !(1..=CONCURRENCY_MAX).contains(&registration.concurrency) {
        problems.push(format!("the concurrency of {key} is 1 to {CONCURRENCY_MAX}"));
    }
    if registration.timeout.is_some_and(|timeout| timeout.is_zero() || timeout > DURATION_MAX) {
        problems.push(format!("the timeout of {key} is more than zero and at most 365days"));
    }
    problems.extend(share_problem(registration));
    problems.extend(settling_problem(registration));
    problems.extend(batch_problems(registration));
    problems.extend(dead_letter_problems(registration));
    problems.extend(timing_problems(registration));
    problems.extend(order_problems(registration));
    problems.extend(registration.flow_problems());
    problems
}

fn share_problem<B: Backend>(registration: &Registration<B>) -> Option<String> {
    let (key, share) = (&registration.key, registration.share?);
    match &registration.body {
        Body::Plain(_) => {
            Some(format!("{key} is not transactional: it has no transaction that deliveries could share"))
        }
        Body::Batch(_) | Body::TxBatch(_) => Some(format!(
            "{key} is a batch handler: a call has one transaction at the most, and share_transaction is not for it"
        )),
        Body::Transactional(_) if !(1..=SHARE_MAX).contains(&share) => {
            Some(format!("the deliveries of {key} that share a transaction are 1 to {SHARE_MAX}"))
        }
        Body::Transactional(_) => None,
    }
}

fn settling_problem<B: Backend>(registration: &Registration<B>) -> Option<String> {
    let key = &registration.key;
    match &registration.body {
        _ if !registration.settles_itself => None,
        Body::Transactional(_) | Body::TxBatch(_) => {
            Some(format!("{key} is transactional: the engine settles its deliveries, it cannot settle them itself"))
        }
        Body::Batch(_) => {
            Some(format!("{key} is a batch handler: it cannot settle its deliveries itself, use tx_batch_handler"))
        }
        Body::Plain(_) if !B::IS_SETTLED_IN_SQL => {
            Some(format!("{key} cannot settle its deliveries itself on SQLite: use tx_handler"))
        }
        Body::Plain(_) => None,
    }
}

fn batch_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let (key, Some(batch)) = (&registration.key, registration.batch) else { return Vec::new() };
    let mut problems = Vec::new();
    match &registration.body {
        Body::Plain(_) | Body::Transactional(_) => {
            problems
                .push(format!("{key} takes one message at a time: batch is for batch_handler and tx_batch_handler"));
        }
        Body::Batch(_) | Body::TxBatch(_) => {}
    }
    if !(1..=BATCH_MAX).contains(&batch.up_to) {
        problems.push(format!("the messages of a batch of {key} are 1 to {BATCH_MAX}"));
    }
    if batch.wait > BATCH_WAIT_MAX {
        problems.push(format!("a batch of {key} waits at most 1h to be filled: others could do what waits"));
    }
    problems
}

fn is_topic(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !name.is_empty() && name.len() <= TOPIC_CHARS_MAX && name.chars().all(is_allowed)
}

fn dead_letter_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let key = &registration.key;
    let mut problems = Vec::new();
    if !registration.dead_letters.is_empty() && !B::HAS_DEAD_LETTERS {
        problems.push(format!("{key} has a dead-letter topic: that takes PostgreSQL"));
    }
    for (reason, topic) in &registration.dead_letters {
        if !is_topic(topic) {
            problems
                .push(format!("the dead-letter topic {topic:?} of {key}: a topic has 1 to 249 of A-Z a-z 0-9 . _ -"));
        }
        if registration.dead_letters.iter().filter(|(other, _)| other == reason).count() > 1 {
            problems.push(format!("{key} has two dead-letter topics for one reason"));
        }
    }
    problems
}

/// Combinations with an order whose meaning nobody has asked for yet are refused.
fn order_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let (key, delay) = (&registration.key, &registration.delay);
    let mut problems = Vec::new();
    if registration.order.is_some() && (delay.after.is_some() || delay.header.is_some()) {
        problems.push(format!("{key} is ordered: its deliveries cannot be delayed as well"));
    }
    if registration.order.is_some() && registration.share.is_some_and(|share| share > 1) {
        problems.push(format!("{key} is ordered: its deliveries cannot share transactions"));
    }
    problems
}

fn timing_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let (key, delay) = (&registration.key, &registration.delay);
    let mut problems = Vec::new();
    if registration.expires_after.is_some_and(|after| after.is_zero() || after > DURATION_MAX) {
        problems.push(format!("expires_after of {key} is more than zero and at most 365days"));
    }
    if delay.after.is_some_and(|after| after.is_zero() || after > DURATION_MAX) {
        problems.push(format!("the delay of {key} is more than zero and at most 365days"));
    }
    if delay.after.zip(registration.expires_after).is_some_and(|(delay, expires)| delay >= expires) {
        problems
            .push(format!("the deliveries of {key} expire before they are due: its delay is not below expires_after"));
    }
    if delay.header.as_ref().is_some_and(String::is_empty) {
        problems.push(format!("the header that delays {key} has a name"));
    }
    problems
}

/// Keys and former keys share one namespace: a text that stands twice would make a delivery belong to two handlers.
fn colliding_keys<B: Backend>(registrations: &[Registration<B>]) -> Vec<String> {
    let mut uses: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for registration in registrations {
        let key = registration.key.as_str();
        uses.entry(key).or_default().push("as a key".to_owned());
        for former in &registration.former_keys {
            uses.entry(former).or_default().push(format!("as a former key of {key}"));
        }
    }
    uses.into_iter()
        .filter(|(_, uses)| uses.len() > 1)
        .map(|(key, uses)| format!("the handler key {key} is used {} times: {}", uses.len(), uses.join(", ")))
        .collect()
}

impl<B: Backend> fmt::Debug for InboxBuilder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InboxBuilder")
            .field("limits", &self.limits)
            .field("handlers", &self.registrations)
            .field("identities", &self.identities)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

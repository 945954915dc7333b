//! Builds an inbox and refuses one that could not work, naming every reason at once.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::OnceCell;

use super::problems::{colliding_keys, registration_problems};
use super::{Inbox, Shared};
use crate::accept::{Acceptor, Identity, Intake, Rules};
use crate::handler::{Attempt, Failure, LayerFn, Next, PoisonHook, Poisoned, Registration, Topics};
#[cfg(feature = "kafka")]
use crate::kafka::Relay;
use crate::operate::{Manifest, ManifestHandler, Retention};
use crate::process::Redact;
use crate::store::{Backend, Store};
use crate::types::{Error, Limits, Result};

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

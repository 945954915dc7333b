//! Builds an inbox. An inbox that could not work is refused, with every reason at once.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::OnceCell;

use super::decoders::{decoder_problems, decoders_of};
use super::problems::{colliding_keys, registration_problems};
use super::{Inbox, Shared};
use crate::accept::{Acceptor, Identity, Intake, Rules};
use crate::handler::{
    AnyDecoder, Attempt, Failure, LayerFn, Next, PoisonHook, Poisoned, Registration, TopicDecoder, Topics,
};
#[cfg(feature = "kafka")]
use crate::kafka::{Kafka, Relay, duplicate_names, source_problems};
use crate::operate::{Manifest, ManifestHandler, Retention};
use crate::process::Redact;
use crate::store::{Backend, Store};
use crate::types::{Decoder, Error, Limits, Result};

/// Configures an inbox: handlers, identities, retention, Kafka sources, limits. [`Inbox::builder`] starts one, and
/// [`InboxBuilder::build`] ends it.
///
/// ```no_run
/// # use wharf::{Failure, HandlerKey, Message, Raw, handler};
/// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
/// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
/// use std::time::Duration;
/// use wharf::{Identity, Inbox, Limits, Postgres, Store};
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let store = Store::<Postgres>::connect(&std::env::var("DATABASE_URL")?).await?;
/// let inbox = Inbox::builder(store)
///     .subscribe("orders", handler(SEND_RECEIPT, send_receipt))
///     .identity("orders", Identity::header("message-id"))
///     .retention(Duration::from_secs(30 * 86_400))
///     .limits(Limits::default().lease(Duration::from_secs(60)))
///     .build()?;
/// # Ok(()) }
/// ```
#[must_use = "call `build` to make the inbox"]
pub struct InboxBuilder<B: Backend> {
    /// `None` if only the manifest is needed.
    store: Option<Store<B>>,
    limits: Limits,
    registrations: Vec<Registration<B>>,
    decoders: Vec<TopicDecoder>,
    /// May contain a topic twice; `build()` refuses that.
    identities: Vec<(Topics, Identity)>,
    retention: Option<Retention>,
    hook: Option<PoisonHook>,
    #[cfg(feature = "kafka")]
    relay: Option<Relay>,
    #[cfg(feature = "kafka")]
    sources: Vec<Kafka>,
    redact: Option<Redact>,
    /// The first layer is the innermost.
    layers: Vec<Arc<LayerFn>>,
}

impl<B: Backend> InboxBuilder<B> {
    pub(super) fn new(store: Store<B>) -> Self {
        Self { store: Some(store), ..Self::without_store() }
    }

    /// Starts a builder without a store, for [`InboxBuilder::manifest`]. It returns the handler keys of a service
    /// without a database. [`InboxBuilder::build`] fails for it.
    ///
    /// ```
    /// use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, handler};
    ///
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    ///
    /// // Used by `main`, by tests, and by the check in CI.
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
            decoders: Vec::new(),
            identities: Vec::new(),
            retention: None,
            hook: None,
            #[cfg(feature = "kafka")]
            relay: None,
            #[cfg(feature = "kafka")]
            sources: Vec::new(),
            redact: None,
            layers: Vec::new(),
        }
    }

    /// Delivers the messages of a topic, or of several, to a handler. A topic that begins with `^` is a pattern, a
    /// regular expression: the handler gets the messages of every topic whose name matches, also of topics that are
    /// created later. `docs/kafka.md` describes patterns.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, handler};
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # const BOOK: HandlerKey = HandlerKey::new("books.order");
    /// # const SHIP: HandlerKey = HandlerKey::new("depot.ship");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// # let (book, ship) = (send_receipt, send_receipt);
    /// inbox
    ///     .subscribe("orders", handler(SEND_RECEIPT, send_receipt))
    ///     .subscribe(["orders", "returns"], handler(BOOK, book))
    ///     .subscribe(r"^orders\..*", handler(SHIP, ship))
    /// # }
    /// ```
    pub fn subscribe(mut self, topics: impl Into<Topics>, mut registration: Registration<B>) -> Self {
        registration.topics.extend(topics.into().0);
        self.registrations.push(registration);
        self
    }

    /// Sets where the records of a topic, or of several, carry their identity, and what happens to records without one.
    /// At most once for each topic. Topics may be patterns, as in [`InboxBuilder::subscribe`]: a policy for the exact
    /// name takes precedence over patterns, and among matching patterns the first one. Default:
    /// [`Identity::cloud_events`], and records without an identity are quarantined. An explicit
    /// [`Record::with_id`](crate::Record::with_id) always takes precedence.
    ///
    /// ```
    /// # use wharf::{InboxBuilder, Postgres};
    /// use wharf::Identity;
    ///
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox
    ///     .identity("orders", Identity::header("message-id"))
    ///     .identity("clicks", Identity::json_pointer("/click/id").or_position())
    /// # }
    /// ```
    pub fn identity(mut self, topics: impl Into<Topics>, identity: Identity) -> Self {
        self.identities.push((topics.into(), identity));
        self
    }

    /// Decodes the payloads of a topic, or of several, for every handler that takes the type that the decoder produces.
    /// Handlers with their own decoder ([`Registration::decoded_by`]) and handlers that take [`Raw`](crate::Raw) bytes
    /// are not affected. Can be called several times, also for one topic whose handlers take different types. Default:
    /// no decoder; payloads are decoded by [`Payload`](crate::Payload), usually from JSON.
    ///
    /// With it, one handler can read one topic in JSON and another in a different format:
    ///
    /// ```
    /// # use wharf::{HandlerKey, InboxBuilder, Postgres, handler};
    /// use wharf::formats::{Encoded, Undecoded};
    /// use wharf::{Failure, Message};
    ///
    /// fn from_text(encoded: &Encoded<'_>) -> Result<u32, Undecoded> {
    ///     Ok(std::str::from_utf8(encoded.bytes())?.trim().parse()?)
    /// }
    ///
    /// async fn send_receipt(order: Message<u32>) -> Result<(), Failure> { Ok(()) }
    ///
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox
    ///     .subscribe(["orders", "orders.legacy"], handler(HandlerKey::new("mail.receipt"), send_receipt))
    ///     .decoded_by("orders.legacy", from_text)
    /// # }
    /// ```
    pub fn decoded_by<P: 'static>(mut self, topics: impl Into<Topics>, decoder: impl Decoder<P>) -> Self {
        self.decoders.push(TopicDecoder { topics: Some(topics.into()), decoder: AnyDecoder::new(decoder) });
        self
    }

    /// Sets the limits of the inbox: leases, batches, queues. Default: [`Limits::default`].
    ///
    /// ```
    /// # use wharf::{InboxBuilder, Postgres};
    /// use std::time::Duration;
    /// use wharf::Limits;
    ///
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox.limits(Limits::default().lease(Duration::from_secs(60)).backlog_rows_max(1_000_000))
    /// # }
    /// ```
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Purges finished messages in the background while the inbox is running. Takes a period, or a [`Retention`] for
    /// more options. Default: nothing is purged. Set it in production; otherwise the database grows without bound.
    ///
    /// ```
    /// # use wharf::{InboxBuilder, Postgres};
    /// use std::time::Duration;
    ///
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox.retention(Duration::from_secs(30 * 86_400))
    /// # }
    /// ```
    pub fn retention(mut self, retention: impl Into<Retention>) -> Self {
        self.retention = Some(retention.into());
        self
    }

    /// Calls an async function for each delivery that is poisoned, in any process: for alarms. The call happens at
    /// least once: it is stored in the transaction that poisons the delivery, until the function has returned without
    /// an error in this process or in another one that has a function. A failed call is repeated after pauses that grow
    /// to five minutes. A call may take 30 seconds. Deliveries that were poisoned before the first start with a
    /// function are not reported. Default: none.
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
    pub fn on_poison<F, E>(mut self, hook: impl Fn(Poisoned) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<Failure> + 'static,
    {
        self.hook = Some(PoisonHook::new(hook));
        self
    }

    /// Sends the records of the [`Outbox`](crate::Outbox) to Kafka while the inbox is running. Default: this process
    /// sends none, and they wait for a process that has a relay.
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

    /// Reads from a Kafka while the inbox is running. Can be called several times: clusters and consumer groups are
    /// read concurrently, each by its own thread, and one that is unavailable or refuses the credentials does not delay
    /// the others. Give each a name ([`Kafka::named`]), and topics ([`Kafka::topics`]) if a source does not have all of
    /// them. `docs/kafka.md` has the details. Default: none. For one source, [`Inbox::start_from`] is shorter.
    ///
    /// ```
    /// # use wharf::kafka::Kafka;
    /// # fn example(builder: wharf::InboxBuilder<wharf::Postgres>) -> wharf::InboxBuilder<wharf::Postgres> {
    /// builder
    ///     .source(Kafka::new("eu-broker:9092", "shop").named("eu"))
    ///     .source(Kafka::new("us-broker:9092", "shop").named("us").topics(["orders"]))
    /// # }
    /// ```
    #[cfg(feature = "kafka")]
    pub fn source(mut self, kafka: Kafka) -> Self {
        self.sources.push(kafka);
        self
    }

    /// Removes secrets from the errors of handlers before they are stored or logged. Default: errors are unchanged.
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

    /// Wraps an async function around each run of every handler, outside of the handlers' own layers and of earlier
    /// calls. See [`Registration::layer`]. Default: no layer.
    ///
    /// ```
    /// # fn example(builder: wharf::InboxBuilder<wharf::Postgres>) -> wharf::InboxBuilder<wharf::Postgres> {
    /// builder.layer(|attempt, next| {
    ///     Box::pin(async move {
    ///         println!("{} runs {}", attempt.handler_key(), attempt.message_id());
    ///         next.run().await
    ///     })
    /// })
    /// # }
    /// ```
    pub fn layer(
        mut self,
        layer: impl for<'a> Fn(Attempt<'a>, Next<'a>) -> BoxFuture<'a, Result<(), Failure>> + Send + Sync + 'static,
    ) -> Self {
        self.layers.push(Arc::new(layer));
        self
    }

    /// Returns the keys of the handlers so far. [`Manifest::plan`] compares them with the keys in the database, to
    /// check a deploy.
    ///
    /// ```
    /// # async fn send_receipt(_: wharf::Message<u32>) -> Result<(), wharf::Failure> { Ok(()) }
    /// let send = wharf::handler(wharf::HandlerKey::new("mail.receipt"), send_receipt).formerly("receipts");
    /// let inbox = wharf::InboxBuilder::<wharf::Postgres>::without_store().subscribe("orders", send);
    /// assert_eq!(inbox.manifest().handlers[0].formerly, ["receipts"]);
    /// ```
    pub fn manifest(&self) -> Manifest {
        let entry = |registration: &Registration<B>| ManifestHandler {
            key: registration.key.as_str().to_owned(),
            formerly: registration.former_keys.clone(),
        };
        Manifest { handlers: self.registrations.iter().map(entry).collect() }
    }

    /// Checks the configuration and makes the inbox. It does not query the database.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Inbox, Message, Raw, Sqlite, Store, handler};
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let store = Store::<Sqlite>::in_memory().await?;
    /// let send = || handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// let error = Inbox::builder(store).subscribe("orders", send()).subscribe("returns", send()).build().unwrap_err();
    /// assert!(error.to_string().contains("the handler key mail.receipt is used 2 times"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When there is no store or no handler; a key or a former key is invalid or is used twice; an option of a handler,
    /// a topic, a limit, a decoder, the retention or a Kafka source is invalid; or an identity policy is invalid, is
    /// given twice, or is for a topic without a handler. The error contains all problems.
    pub fn build(mut self) -> Result<Inbox<B>> {
        let manifest = self.manifest();
        let mut problems = self.limits.problems();
        if self.registrations.is_empty() {
            problems.push("an inbox must have at least one handler: call subscribe".to_owned());
        }
        problems.extend(self.registrations.iter().flat_map(registration_problems));
        problems.extend(colliding_keys(&self.registrations));
        problems.extend(decoder_problems(&self.registrations, &self.decoders));
        let subscriptions = self.registrations.iter().map(Registration::subscription).collect();
        let (rules, cannot_work) = Rules::new(subscriptions, self.identities);
        problems.extend(cannot_work);
        problems.extend(self.retention.iter().flat_map(Retention::problems));
        #[cfg(feature = "kafka")]
        {
            problems.extend(duplicate_names(self.sources.iter()));
            problems.extend(self.sources.iter().flat_map(|source| source_problems(source, &rules)));
        }
        if self.store.is_none() {
            problems.push("it has no store: start with Inbox::builder(store)".to_owned());
        }
        let Some(store) = self.store.filter(|_| problems.is_empty()) else {
            return Err(Error::configuration(format!("cannot build the inbox: {}", problems.join("; "))));
        };
        for registration in &self.registrations {
            registration.body.decoding().decode_by(decoders_of(registration, &self.decoders));
        }
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
            #[cfg(feature = "kafka")]
            sources: self.sources,
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

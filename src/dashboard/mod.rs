//! The dashboard: inspect and operate an inbox in a browser. Mount [`Dashboard::router`] in a service, or run
//! `wharf dashboard`.
//!
//! Pages are rendered on the server and work without JavaScript; with it, they update by themselves. One sampler
//! queries the database for all open tabs. Nothing is loaded from other servers.
//!
//! Actions go through [`Operator`](crate::operate::Operator), in the visitor's name. Nothing here runs a handler or
//! contains SQL. A page contains a payload only when the visitor requests it.

mod access;
mod app;
mod assets;
mod base;
mod bound;
mod decoding;
mod groups;
mod guard;
mod jobs;
mod long_act;
mod looked_up;
mod pages;
mod plot;
mod query;
mod reads;
mod refusal;
mod sampler;
mod text;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;

pub use access::{Access, Visitor};

use crate::store::{Backend, Store};
use crate::types::{Decoder, Error, Kind, Readable, Result};
use app::App;
use decoding::{Decoding, ForPeople};

/// How often the sampler queries the database while a page is open.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);

/// The dashboard of one inbox, before it is served.
///
/// ```no_run
/// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
/// use wharf::dashboard::{Access, Dashboard};
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:8088").await.unwrap();
/// Dashboard::new(&store, Access::on_this_machine()).acting_as("alice").serve(listener).await
/// # }
/// ```
#[must_use = "a dashboard does nothing until it is served"]
pub struct Dashboard<B: Backend> {
    store: Store<B>,
    access: Access,
    actor: String,
    hosts: Vec<String>,
    sample_every: Duration,
    decoder: Option<ForPeople>,
}

impl<B: Backend> Dashboard<B> {
    /// Creates the dashboard of this store, for the visitors that `access` allows.
    pub fn new(store: &Store<B>, access: Access) -> Self {
        let (store, actor) = (store.clone(), "dashboard".to_owned());
        Self { store, access, actor, hosts: Vec::new(), sample_every: SAMPLE_EVERY, decoder: None }
    }

    /// Sets the audit name for visitors who have no name of their own. Default: `dashboard`.
    ///
    /// ```no_run
    /// # fn example(store: wharf::Store<wharf::Postgres>) {
    /// # use wharf::dashboard::{Access, Dashboard};
    /// let dashboard = Dashboard::new(&store, Access::on_this_machine()).acting_as("alice");
    /// # }
    /// ```
    pub fn acting_as(mut self, actor: impl Into<String>) -> Self {
        self.actor = actor.into();
        self
    }

    /// Adds a host name, without port, under which browsers reach the dashboard. Requests for other hosts are refused,
    /// which prevents DNS rebinding. `localhost` and loopback addresses are always allowed. Can be called several
    /// times. Default: no other name.
    ///
    /// ```no_run
    /// # fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// # use wharf::dashboard::{Access, Dashboard};
    /// let access = Access::by_token(std::env::var("DASHBOARD_TOKEN").unwrap_or_default())?;
    /// let dashboard = Dashboard::new(&store, access).host("inbox.example.com");
    /// # Ok(()) }
    /// ```
    pub fn host(mut self, name: impl Into<String>) -> Self {
        self.hosts.push(name.into());
        self
    }

    /// Sets how often the sampler queries the database while a page is open; the minimum is 100 ms. Otherwise it queries
    /// a sixth as often. Default: 5 s.
    ///
    /// ```no_run
    /// # fn example(store: wharf::Store<wharf::Postgres>) {
    /// # use wharf::dashboard::{Access, Dashboard};
    /// let every = std::time::Duration::from_secs(15);
    /// let dashboard = Dashboard::new(&store, Access::on_this_machine()).sample_every(every);
    /// # }
    /// ```
    pub fn sample_every(mut self, every: Duration) -> Self {
        self.sample_every = every.max(Duration::from_millis(100));
        self
    }

    /// Shows payloads and keys also as this decoder decodes them, above their raw form. `wharf::formats::AnyFormat`
    /// decodes what a schema registry has schemas for, and CloudEvents; a function or a type of your own decodes other
    /// formats. Default: none, so JSON and text are shown as they are, and other bytes in hexadecimal.
    ///
    /// The decoder is called when a visitor requests a payload and has the right to see it, once for the payload and
    /// once for the key ([`Encoded::is_key`](crate::formats::Encoded::is_key)). For bytes whose format it does not know
    /// it returns `None`. The page shows an error or a panic as a sentence, waits at most ten seconds, and shows at
    /// most 256 KiB. A decoder that does not return occupies a thread of the runtime until it does; no more than four
    /// run at a time.
    ///
    /// ```no_run
    /// # fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// # use wharf::dashboard::{Access, Dashboard};
    /// use wharf::formats::{AnyFormat, Registry};
    /// let registry = Registry::at("https://schemas.example.com").build()?;
    /// let decoder = AnyFormat::new().registry(&registry);
    /// let dashboard = Dashboard::new(&store, Access::on_this_machine()).decoded_by(decoder);
    /// # Ok(()) }
    /// ```
    ///
    /// With a format of your own:
    ///
    /// ```no_run
    /// # fn example(store: wharf::Store<wharf::Postgres>) {
    /// # use wharf::dashboard::{Access, Dashboard};
    /// use wharf::formats::{Encoded, Readable, Undecoded};
    ///
    /// fn decode(encoded: &Encoded<'_>) -> Result<Option<Readable>, Undecoded> {
    ///     match (encoded.topic(), encoded.bytes()) {
    ///         ("temperatures", [high, low]) => Ok(Some(Readable::new("big endian", u16::from_be_bytes([*high, *low])))),
    ///         ("temperatures", _) => Err("a temperature has two bytes".into()),
    ///         _ => Ok(None),
    ///     }
    /// }
    ///
    /// let dashboard = Dashboard::new(&store, Access::on_this_machine()).decoded_by(decode);
    /// # }
    /// ```
    pub fn decoded_by(mut self, decoder: impl Decoder<Option<Readable>>) -> Self {
        self.decoder = Some(Arc::new(decoder));
        self
    }

    /// Returns the dashboard as a router, to nest in the router of a service. Links follow the path that it is nested
    /// at. The database is queried from the first request on, until the router is dropped.
    ///
    /// With [`Access::on_this_machine`] the service must listen on a loopback address only: a router does not know
    /// where it is served.
    ///
    /// ```no_run
    /// # fn example(store: wharf::Store<wharf::Postgres>) {
    /// use wharf::dashboard::{Access, Dashboard, Visitor};
    /// // The service's own middleware adds `Employee` to the request.
    /// #[derive(Clone)]
    /// struct Employee { name: String, is_on_call: bool }
    /// let access = Access::by(|request| match request.extensions.get::<Employee>() {
    ///     Some(who) if who.is_on_call => Visitor::named(&who.name).may_act().may_see_payloads(),
    ///     Some(who) => Visitor::named(&who.name).may_look(),
    ///     None => Visitor::nobody(),
    /// });
    /// let dashboard = Dashboard::new(&store, access).host("shop.example.com").router();
    /// let service = axum::Router::<()>::new().nest("/inbox", dashboard);
    /// # }
    /// ```
    pub fn router(self) -> Router {
        let Self { store, access, actor, hosts, sample_every, decoder } = self;
        guard::router(Arc::new(App::new(store, access, actor, hosts, sample_every, Decoding::new(decoder))))
    }

    /// Serves the dashboard until the future is dropped.
    ///
    /// # Errors
    /// When the access rule is [`Access::on_this_machine`] and the listener's address is not a loopback one; or the
    /// listener fails.
    pub async fn serve(mut self, listener: TcpListener) -> Result<()> {
        let address = listener.local_addr().map_err(cannot_serve)?;
        self.check_address(address)?;
        self.hosts.push(address.ip().to_string());
        axum::serve(listener, self.router()).await.map_err(cannot_serve)
    }

    /// Refuses access without a token or a rule on an address that other machines can reach.
    fn check_address(&self, address: SocketAddr) -> Result<()> {
        match self.access.is_for_this_machine_only() && !address.ip().is_loopback() {
            false => Ok(()),
            true => Err(Error::configuration(format!(
                "other machines can reach {address}: the dashboard needs a token there, or an access rule of your own"
            ))),
        }
    }
}

fn cannot_serve(error: std::io::Error) -> Error {
    Error::new(Kind::Connection, "cannot serve the dashboard").with_source(error)
}

impl<B: Backend> fmt::Debug for Dashboard<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dashboard").field("actor", &self.actor).field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

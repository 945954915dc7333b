//! The dashboard: an inbox in a browser, to look at and to act on. [`Dashboard::router`] is mounted in a service, `wharf dashboard` serves it.
//!
//! Pages are rendered on the server and work without JavaScript; with it, they are kept up to date. One sampler looks at the database for
//! everybody, however many tabs are open. Nothing is loaded from elsewhere.
//!
//! Acts go through [`Operator`](crate::operate::Operator), in the visitor's name. Nothing here runs a handler or knows SQL. A page never has a
//! payload that was not asked for.

mod access;
mod app;
mod assets;
mod guard;
mod jobs;
mod looked_up;
mod pages;
mod plot;
mod query;
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
use crate::types::{Error, Kind, Result};
use app::App;

/// How often the database is looked at while somebody has a page open.
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
}

impl<B: Backend> Dashboard<B> {
    /// The dashboard of this store, for those whom `access` lets in.
    pub fn new(store: &Store<B>, access: Access) -> Self {
        let (store, actor) = (store.clone(), "dashboard".to_owned());
        Self { store, access, actor, hosts: Vec::new(), sample_every: SAMPLE_EVERY }
    }

    /// In whose name visitors act who have no name of their own. Default: `dashboard`.
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

    /// A name under which browsers reach the dashboard, without port. A request for another host is refused, so that no other site can make
    /// its own name lead here (DNS rebinding). `localhost` and loopback addresses are always known. Can be called several times.
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

    /// How often the database is looked at while somebody has a page open; a sixth as often otherwise. Default: 5 s.
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

    /// The dashboard as a router, to be nested in a service's own: links follow the path that it is nested at. The database is first looked
    /// at when somebody comes, and no longer when the router is dropped.
    ///
    /// With [`Access::on_this_machine`] the service must listen on a loopback address only: a router does not know where it is served.
    ///
    /// ```no_run
    /// # fn example(store: wharf::Store<wharf::Postgres>) {
    /// use wharf::dashboard::{Access, Dashboard, Visitor};
    /// // `Employee` is what the service's own middleware has put into the request.
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
        let Self { store, access, actor, hosts, sample_every } = self;
        guard::router(Arc::new(App::new(store, access, actor, hosts, sample_every)))
    }

    /// Serves it until the future is dropped.
    ///
    /// # Errors
    /// When the listener's address is not a loopback one and everybody on this machine would be let in; or the listener fails.
    pub async fn serve(mut self, listener: TcpListener) -> Result<()> {
        let address = listener.local_addr().map_err(cannot_serve)?;
        self.check_address(address)?;
        self.hosts.push(address.ip().to_string());
        axum::serve(listener, self.router()).await.map_err(cannot_serve)
    }

    /// Whether it may be served there.
    fn check_address(&self, address: SocketAddr) -> Result<()> {
        match self.access.is_for_this_machine_only() && !address.ip().is_loopback() {
            false => Ok(()),
            true => Err(Error::configuration(format!(
                "{address} is reached from other machines: the dashboard needs a token there, or rights of your own"
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

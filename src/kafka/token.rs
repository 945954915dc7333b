//! Tokens for SASL/OAUTHBEARER: the provider, and the task that keeps a client's token valid.
//!
//! The user's function is called for a token before the client needs it, and again after four fifths of the token's
//! lifetime. When it fails, it is retried with backoff; the failure is reported once, and stays a health problem until
//! the function succeeds. Tokens are never shown.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, TryFutureExt};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{Producer, ThreadedProducer};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;

use super::native;
use super::produce::ProducerCallbacks;
use super::rebalance::Context;
use super::{Kafka, Relay};
use crate::types::{Backoff, panic_text};

/// How long the user's function may take.
const ANSWER_WAIT: Duration = Duration::from_secs(30);
/// The longest pause after a failure.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// The machine's clock is read at least this often while waiting: it may be changed, and the machine may sleep.
const POLL_EVERY: Duration = Duration::from_secs(10);
/// The next token is requested after this share of the current token's remaining lifetime.
const REFRESH_AFTER: f64 = 0.8;

/// A token for SASL/OAUTHBEARER. The function of [`Kafka::token_from`] returns it.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use wharf::kafka::Token;
///
/// let token = Token::new("eyJhbGciOi…", SystemTime::now() + Duration::from_secs(900))
///     .extension("logicalCluster", "lkc-1")
///     .extension("identityPoolId", "pool-1");
/// ```
#[derive(Clone)]
pub struct Token {
    /// Secret: `Debug` does not show it.
    pub(super) value: String,
    pub(super) ends_at: SystemTime,
    pub(super) principal: String,
    pub(super) extensions: Vec<(String, String)>,
}

impl Token {
    /// Creates a token from the value that the broker gets, usually a JWT, and its expiry. The next token is requested
    /// when four fifths of the time until then are over, and at least once a day.
    ///
    /// ```
    /// # use std::time::{Duration, SystemTime};
    /// let token = wharf::kafka::Token::new("eyJhbGciOi…", SystemTime::now() + Duration::from_secs(900));
    /// ```
    pub fn new(value: impl Into<String>, ends_at: SystemTime) -> Self {
        Self { value: value.into(), ends_at, principal: String::new(), extensions: Vec::new() }
    }

    /// Sets the name of the principal, for librdkafka's log. Brokers read it from the token itself. Default: empty.
    ///
    /// ```
    /// # fn example(token: wharf::kafka::Token) -> wharf::kafka::Token {
    /// token.principal("shop")
    /// # }
    /// ```
    #[must_use]
    pub fn principal(mut self, name: impl Into<String>) -> Self {
        self.principal = name.into();
        self
    }

    /// Adds a SASL extension that is sent with the token (RFC 7628), such as Confluent Cloud's `logicalCluster` and
    /// `identityPoolId`. Default: none.
    ///
    /// ```
    /// # fn example(token: wharf::kafka::Token) -> wharf::kafka::Token {
    /// token.extension("logicalCluster", "lkc-1").extension("identityPoolId", "pool-1")
    /// # }
    /// ```
    #[must_use]
    pub fn extension(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.extensions.push((name.into(), value.into()));
        self
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extensions: Vec<&str> = self.extensions.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Token")
            .field("ends_at", &self.ends_at)
            .field("principal", &self.principal)
            .field("extensions", &extensions)
            .finish_non_exhaustive()
    }
}

/// A call of the user's function.
type Asking = BoxFuture<'static, Result<Token, Box<dyn StdError + Send + Sync>>>;

/// The user's function that provides tokens.
#[derive(Clone)]
pub(crate) struct TokenProvider(Arc<dyn Fn() -> Asking + Send + Sync>);

impl TokenProvider {
    fn new<F, P, E>(provider: F) -> Self
    where
        F: Fn() -> P + Send + Sync + 'static,
        P: Future<Output = Result<Token, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    {
        Self(Arc::new(move || provider().map_err(Into::into).boxed()))
    }

    /// Calls the function once, with a timeout. The error text does not contain the token.
    pub(super) async fn ask(&self) -> Result<Token, String> {
        let asking = async { (self.0)().await };
        let asked = tokio::time::timeout(ANSWER_WAIT, AssertUnwindSafe(asking).catch_unwind()).await;
        let token = match asked {
            Err(_) => return Err(format!("the token provider did not answer within {} s", ANSWER_WAIT.as_secs())),
            Ok(Err(panic)) => return Err(format!("the token provider panicked: {}", panic_text(panic))),
            Ok(Ok(Err(error))) => return Err(format!("the token provider failed: {}", with_causes(&*error))),
            Ok(Ok(Ok(token))) => token,
        };
        match token.ends_at <= SystemTime::now() {
            true => Err("the token provider returned an expired token".to_owned()),
            false => Ok(token),
        }
    }
}

/// The error and its causes, separated by colons.
fn with_causes(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

impl Kafka {
    /// Authenticates with SASL/OAUTHBEARER and the tokens of this function: for AWS MSK IAM, Azure Event Hubs, Google
    /// Managed Kafka, or your own token service. Needs the feature `ssl`. Default: no tokens.
    ///
    /// ```
    /// # async fn fetch() -> Result<(String, u64), std::io::Error> { Ok((String::new(), 0)) }
    /// use std::time::{Duration, SystemTime};
    /// use wharf::kafka::{Kafka, Token};
    ///
    /// let kafka = Kafka::new("broker-1:9094", "shop").set("security.protocol", "sasl_ssl").token_from(|| async {
    ///     let (token, valid_secs) = fetch().await?;
    ///     Ok::<_, std::io::Error>(Token::new(token, SystemTime::now() + Duration::from_secs(valid_secs)))
    /// });
    /// ```
    ///
    /// The function is called before each client connects, again when four fifths of the time until the token expires
    /// are over, and when Kafka refuses a token. Open connections continue with the new token. While the function
    /// fails, it is called again after pauses of at most ten seconds; that is logged once, and is a reason in
    /// [`Running::health`](crate::Running::health) until it succeeds. It runs on the store's own thread and must not
    /// block it. It may take 30 seconds. Its error is shown, so it must not contain the token.
    ///
    /// `sasl.mechanism` need not be set. `docs/kafka.md` has examples for each cloud.
    #[cfg_attr(docsrs, doc(cfg(feature = "ssl")))]
    pub fn token_from<F, P, E>(mut self, provider: F) -> Self
    where
        F: Fn() -> P + Send + Sync + 'static,
        P: Future<Output = Result<Token, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    {
        self.tokens = Some(TokenProvider::new(provider));
        self
    }
}

impl Relay {
    /// Like [`Kafka::token_from`], for the producer of the relay. Default: no tokens.
    ///
    /// ```
    /// # async fn fetch() -> Result<String, std::io::Error> { Ok(String::new()) }
    /// use std::time::{Duration, SystemTime};
    /// use wharf::kafka::{Relay, Token};
    ///
    /// let relay = Relay::new("broker-1:9094").set("security.protocol", "sasl_ssl").token_from(|| async {
    ///     Ok::<_, std::io::Error>(Token::new(fetch().await?, SystemTime::now() + Duration::from_secs(900)))
    /// });
    /// ```
    #[cfg_attr(docsrs, doc(cfg(feature = "ssl")))]
    pub fn token_from<F, P, E>(mut self, provider: F) -> Self
    where
        F: Fn() -> P + Send + Sync + 'static,
        P: Future<Output = Result<Token, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    {
        self.tokens = Some(TokenProvider::new(provider));
        self
    }
}

/// A client that authenticates with tokens.
pub(super) trait Authenticated: Send + Sync + 'static {
    /// Gives the client a token. The error does not contain the token.
    fn set(&self, token: &Token) -> Result<(), String>;
    /// Called after the client has taken a token.
    fn has_token(&self);
    /// Called when the function failed, or the client refused its token.
    fn has_no_token(&self, error: &str);
}

impl Authenticated for BaseConsumer<Context> {
    fn set(&self, token: &Token) -> Result<(), String> {
        native::token::set(self.client(), token)
    }

    fn has_token(&self) {
        self.context().has_token();
    }

    fn has_no_token(&self, error: &str) {
        self.context().has_no_token(error);
    }
}

impl Authenticated for ThreadedProducer<ProducerCallbacks> {
    fn set(&self, token: &Token) -> Result<(), String> {
        native::token::set(self.client(), token)
    }

    fn has_token(&self) {
        self.context().has_token();
    }

    fn has_no_token(&self, error: &str) {
        self.context().has_no_token(error);
    }
}

/// Keeps the client's token valid for as long as the client exists. Upgrades the client only inside `spawn_blocking`:
/// dropping the last reference waits until it is closed.
///
/// `is_refused` is notified when Kafka refuses the token, which is then replaced early, after a pause.
pub(super) async fn keep<C: Authenticated>(provider: TokenProvider, client: Weak<C>, is_refused: Arc<Notify>) {
    let mut backoff = Backoff::new(PAUSE_MAX);
    loop {
        let asked = provider.ask().await;
        let asked_at = SystemTime::now();
        let ends_at = asked.as_ref().ok().map(|token| token.ends_at);
        let client = client.clone();
        let is_set = spawn_blocking(move || give(&client, asked)).await.ok().flatten();
        match (is_set, ends_at) {
            // The client or the runtime has ended.
            (None, _) => return,
            (Some(true), Some(ends_at)) => {
                tokio::select! {
                    () = wait_until(refresh_at(asked_at, ends_at)) => backoff.reset(),
                    () = is_refused.notified() => backoff.pause().await,
                }
            }
            (Some(_), _) => backoff.pause().await,
        }
    }
}

/// Returns whether the client has taken the token; `None` when it is gone. Blocks.
fn give<C: Authenticated>(client: &Weak<C>, asked: Result<Token, String>) -> Option<bool> {
    let client = client.upgrade()?;
    let given = asked.and_then(|token| client.set(&token));
    match &given {
        Ok(()) => client.has_token(),
        Err(error) => client.has_no_token(error),
    }
    Some(given.is_ok())
}

/// When to request the next token, given that the current one was received at `now`.
fn refresh_at(now: SystemTime, ends_at: SystemTime) -> SystemTime {
    // A token that is valid for longer than a day, or without end, is renewed as if it were valid for a day.
    let left = ends_at.duration_since(now).unwrap_or_default().min(Duration::from_secs(86_400));
    now + left.mul_f64(REFRESH_AFTER)
}

/// Waits until a time of the machine's clock, in short sleeps: a tokio sleep does not follow changes of that clock.
async fn wait_until(time: SystemTime) {
    while let Ok(left) = time.duration_since(SystemTime::now()) {
        tokio::time::sleep(left.min(POLL_EVERY) + Duration::from_millis(1)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_secs(secs: u64) -> SystemTime {
        SystemTime::now() + Duration::from_secs(secs)
    }

    #[test]
    fn a_token_is_asked_for_again_when_four_fifths_of_its_time_are_over() {
        let now = SystemTime::now();
        assert_eq!(refresh_at(now, now + Duration::from_secs(100)), now + Duration::from_secs(80));
        assert_eq!(refresh_at(now, now - Duration::from_secs(1)), now);
        assert!(refresh_at(now, now + Duration::from_secs(u64::from(u32::MAX))) <= now + Duration::from_secs(86_400));
    }

    #[test]
    fn a_token_is_not_shown() {
        let token = Token::new("secret-1", in_secs(1)).principal("shop").extension("pool", "secret-2");
        let shown = format!("{token:?}");
        assert!(!shown.contains("secret") && shown.contains("shop") && shown.contains("pool"), "{shown}");
    }

    #[tokio::test]
    async fn a_provider_that_fails_panics_or_gives_an_old_token_is_an_error_in_words() {
        let failing = TokenProvider::new(|| async { Err::<Token, _>("no route to the token service") });
        assert_eq!(failing.ask().await.unwrap_err(), "the token provider failed: no route to the token service");
        let panicking = TokenProvider::new(|| async {
            assert!(SystemTime::now() < SystemTime::UNIX_EPOCH, "out of order");
            Err::<Token, _>("unreachable")
        });
        assert!(panicking.ask().await.unwrap_err().starts_with("the token provider panicked: out of order"));
        let old = TokenProvider::new(|| async { Ok::<_, String>(Token::new("secret", SystemTime::UNIX_EPOCH)) });
        assert_eq!(old.ask().await.unwrap_err(), "the token provider returned an expired token");
    }
}

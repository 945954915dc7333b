//! Access rules: who may look, see payloads, and act.
//!
//! There is no default: the program that serves a dashboard must choose a rule. A token is compared by its hash and
//! never shown. A visitor who has entered the token gets a random session cookie, which does not contain the token.

use std::collections::VecDeque;
use std::fmt;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::types::{Error, Result};

/// Shorter tokens could be guessed.
const TOKEN_BYTES_MIN: usize = 16;
/// The maximum number of sessions. When it is exceeded, the oldest session ends.
const SESSIONS_MAX: usize = 1_000;
/// The audit name of clients that send the token in a header: programs, which do not log in with a name.
const TOKEN_NAME: &str = "token";
/// The name of the cookie.
pub(super) const COOKIE: &str = "wharf_dashboard";

type Hook = dyn Fn(&Parts) -> Visitor + Send + Sync;

/// Who may use the dashboard. [`Dashboard`](super::Dashboard) takes it.
///
/// ```
/// use wharf::dashboard::{Access, Visitor};
///
/// // A proxy in front of the service authenticates people and adds this header.
/// let access = Access::by(|request| match request.headers.get("x-user").and_then(|name| name.to_str().ok()) {
///     Some(name) => Visitor::named(name).may_act(),
///     None => Visitor::nobody(),
/// });
/// ```
#[derive(Clone)]
pub struct Access(AccessKind);

#[derive(Clone)]
enum AccessKind {
    ThisMachine,
    Token(Arc<Token>),
    Hook(Arc<Hook>),
}

struct Token {
    hash: [u8; 32],
    /// Session cookies with the names of their visitors. A std mutex: nothing awaits while holding it.
    sessions: Mutex<VecDeque<(String, String)>>,
}

impl Access {
    /// Allows every client that can connect, with all rights. [`Dashboard::serve`](super::Dashboard::serve) refuses
    /// this on addresses that other machines can reach.
    ///
    /// ```
    /// let access = wharf::dashboard::Access::on_this_machine();
    /// ```
    pub fn on_this_machine() -> Self {
        Self(AccessKind::ThisMachine)
    }

    /// Allows every client that has the token, with all rights. The token is typed into the login page together with a
    /// name for the audit, or sent by a program in the header `Authorization: Bearer …`, which the audit records as
    /// `token`.
    ///
    /// ```
    /// # use wharf::dashboard::Access;
    /// assert!(Access::by_token("b6a1f0c2d3e4958677").is_ok());
    /// assert!(Access::by_token("too short").is_err());
    /// ```
    ///
    /// # Errors
    /// When the token has fewer than 16 bytes.
    pub fn by_token(token: impl AsRef<str>) -> Result<Self> {
        let token = token.as_ref().trim();
        if token.len() < TOKEN_BYTES_MIN {
            return Err(Error::configuration("a token for the dashboard must have at least 16 characters"));
        }
        Ok(Self(AccessKind::Token(Arc::new(Token { hash: hash(token), sessions: Mutex::default() }))))
    }

    /// Lets a function of the service decide, which gets the head of each request: its headers, and the extensions that
    /// a middleware has added.
    ///
    /// ```
    /// # use wharf::dashboard::{Access, Visitor};
    /// // Everybody may look, nobody may act or see payloads.
    /// let access = Access::by(|_request| Visitor::nobody().may_look());
    /// ```
    pub fn by(rights: impl Fn(&Parts) -> Visitor + Send + Sync + 'static) -> Self {
        Self(AccessKind::Hook(Arc::new(rights)))
    }

    pub(super) fn is_for_this_machine_only(&self) -> bool {
        matches!(self.0, AccessKind::ThisMachine)
    }

    /// Whether a visitor without rights can log in with a token.
    pub(super) fn asks_for_a_token(&self) -> bool {
        matches!(self.0, AccessKind::Token(_))
    }

    pub(super) fn visitor(&self, parts: &Parts) -> Visitor {
        match &self.0 {
            AccessKind::ThisMachine => Visitor::with_all_rights(None),
            AccessKind::Hook(hook) => hook(parts),
            AccessKind::Token(token) => token.visitor(&parts.headers),
        }
    }

    /// Whether the request has the token in its header. Browsers do not add that header by themselves, so no other site
    /// can cause such a request.
    pub(super) fn is_token_sent(&self, headers: &HeaderMap) -> bool {
        matches!(&self.0, AccessKind::Token(token) if token.is_sent(headers))
    }

    /// Returns a session cookie if the token is correct.
    pub(super) fn log_in(&self, given: &str, name: &str) -> Option<String> {
        let AccessKind::Token(token) = &self.0 else { return None };
        token.log_in(given, name)
    }
}

impl Token {
    fn is_sent(&self, headers: &HeaderMap) -> bool {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        bearer.is_some_and(|given| hash(given.trim()) == self.hash)
    }

    fn visitor(&self, headers: &HeaderMap) -> Visitor {
        if self.is_sent(headers) {
            return Visitor::with_all_rights(Some(TOKEN_NAME.to_owned()));
        }
        let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let given = cookies(headers);
        let known = given.filter_map(|cookie| sessions.iter().find(|(session, _)| *session == cookie)).next();
        known.map_or_else(Visitor::nobody, |(_, name)| Visitor::with_all_rights(Some(name.clone())))
    }

    fn log_in(&self, given: &str, name: &str) -> Option<String> {
        if hash(given.trim()) != self.hash {
            return None;
        }
        let session = rand::random::<[u8; 32]>().iter().fold(String::new(), |mut hex, byte| {
            // Writing to a String cannot fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.push_back((session.clone(), name.to_owned()));
        if sessions.len() > SESSIONS_MAX {
            sessions.pop_front();
        }
        Some(session)
    }
}

/// The hashes are compared instead of the tokens, so that the duration of the comparison reveals nothing about the
/// token.
fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token).into()
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    all.flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.trim().split_once('=').filter(|(name, _)| *name == COOKIE).map(|(_, value)| value))
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            AccessKind::ThisMachine => "Access::on_this_machine",
            AccessKind::Token(_) => "Access::by_token",
            AccessKind::Hook(_) => "Access::by",
        })
    }
}

/// The client of a request, and its rights. The right to act or to see payloads includes the right to look.
///
/// ```
/// use wharf::dashboard::Visitor;
///
/// let support = Visitor::named("ada").may_look();
/// let on_call = Visitor::named("grace").may_see_payloads().may_act();
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visitor {
    pub(super) name: Option<String>,
    pub(super) may_look: bool,
    pub(super) may_see_payloads: bool,
    pub(super) may_act: bool,
}

impl Visitor {
    /// A visitor without rights.
    ///
    /// ```
    /// let visitor = wharf::dashboard::Visitor::nobody();
    /// ```
    pub fn nobody() -> Self {
        Self { name: None, may_look: false, may_see_payloads: false, may_act: false }
    }

    /// A visitor with this name, which the audit records. It has no rights until they are added.
    ///
    /// ```
    /// let visitor = wharf::dashboard::Visitor::named("ada").may_look();
    /// ```
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..Self::nobody() }
    }

    /// Adds the right to look at everything but payloads, keys and values of headers.
    ///
    /// ```
    /// let visitor = wharf::dashboard::Visitor::named("ada").may_look();
    /// ```
    #[must_use]
    pub fn may_look(mut self) -> Self {
        self.may_look = true;
        self
    }

    /// Adds the right to see payloads, keys and values of headers.
    ///
    /// ```
    /// let visitor = wharf::dashboard::Visitor::named("ada").may_see_payloads();
    /// ```
    #[must_use]
    pub fn may_see_payloads(mut self) -> Self {
        self.may_see_payloads = true;
        self.may_look()
    }

    /// Adds the right to act: replay, discard, release, pause, resume.
    ///
    /// ```
    /// let visitor = wharf::dashboard::Visitor::named("ada").may_act();
    /// ```
    #[must_use]
    pub fn may_act(mut self) -> Self {
        self.may_act = true;
        self.may_look()
    }

    fn with_all_rights(name: Option<String>) -> Self {
        Self { name, may_look: true, may_see_payloads: true, may_act: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn with(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn only_the_token_or_its_cookie_opens() {
        assert!(Access::by_token("short").is_err());
        let Access(AccessKind::Token(token)) = Access::by_token("0123456789abcdef\n").unwrap() else { panic!() };
        assert_eq!(token.visitor(&HeaderMap::new()), Visitor::nobody());
        assert_eq!(token.visitor(&with(header::AUTHORIZATION, "Bearer 0123456789abcdeX")), Visitor::nobody());
        assert!(token.visitor(&with(header::AUTHORIZATION, "Bearer 0123456789abcdef")).may_act);
        assert_eq!(token.log_in("0123456789abcdeX", "mallory"), None);
        let session = token.log_in("0123456789abcdef", "alice").unwrap();
        let known = token.visitor(&with(header::COOKIE, &format!("a=b; {COOKIE}={session}")));
        assert_eq!(known, Visitor::with_all_rights(Some("alice".to_owned())));
        assert_eq!(token.visitor(&with(header::COOKIE, &format!("{COOKIE}="))), Visitor::nobody());
    }

    #[test]
    fn a_right_to_act_is_one_to_look() {
        let visitor = Visitor::named("alice").may_act();
        assert!(visitor.may_look && visitor.may_act && !visitor.may_see_payloads);
    }
}

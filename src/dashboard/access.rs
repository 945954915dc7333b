//! Who may look, see payloads, and act.
//!
//! There is no default: whoever serves a dashboard says whom it lets in. A token is compared by its hash and never shown; a visitor who has
//! given it is known by a cookie that is worth nothing elsewhere.

use std::collections::VecDeque;
use std::fmt;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::types::{Error, Result};

/// A token that can be guessed is none.
const TOKEN_BYTES_MIN: usize = 16;
/// Visitors who are remembered at a time; the longest known are forgotten first.
const SESSIONS_MAX: usize = 1_000;
/// The name of the cookie.
pub(super) const COOKIE: &str = "wharf_dashboard";

type Hook = dyn Fn(&Parts) -> Visitor + Send + Sync;

/// Whom the dashboard lets in.
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
    /// Cookies with the names of those who have them. A std mutex: nothing awaits while holding it.
    sessions: Mutex<VecDeque<(String, String)>>,
}

impl Access {
    /// Everybody who reaches it, with all rights. [`Dashboard::serve`](super::Dashboard::serve) refuses this on addresses that other machines reach.
    pub fn on_this_machine() -> Self {
        Self(AccessKind::ThisMachine)
    }

    /// Whoever has the token, with all rights: in the header `Authorization: Bearer …`, or typed into the page that asks for it, together with a
    /// name for the audit.
    ///
    /// # Errors
    /// When the token has fewer than 16 bytes.
    pub fn by_token(token: impl AsRef<str>) -> Result<Self> {
        let token = token.as_ref().trim();
        if token.len() < TOKEN_BYTES_MIN {
            return Err(Error::configuration("a token for the dashboard has at least 16 characters"));
        }
        Ok(Self(AccessKind::Token(Arc::new(Token { hash: hash(token), sessions: Mutex::default() }))))
    }

    /// Whoever the service says, by the request's head: its headers, or what a middleware has put into its extensions. Called for each request.
    pub fn by(rights: impl Fn(&Parts) -> Visitor + Send + Sync + 'static) -> Self {
        Self(AccessKind::Hook(Arc::new(rights)))
    }

    pub(super) fn is_for_this_machine_only(&self) -> bool {
        matches!(self.0, AccessKind::ThisMachine)
    }

    /// Whether a visitor without rights can give a token.
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

    /// Gives the cookie for a token that is the right one.
    pub(super) fn log_in(&self, given: &str, name: &str) -> Option<String> {
        let AccessKind::Token(token) = &self.0 else { return None };
        token.log_in(given, name)
    }
}

impl Token {
    fn visitor(&self, headers: &HeaderMap) -> Visitor {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        if bearer.is_some_and(|given| hash(given.trim()) == self.hash) {
            return Visitor::with_all_rights(None);
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

/// Compared in place of the token itself: how long it takes says nothing of the token.
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

/// Somebody who has come, and what that person may do. A right to act or to see payloads is also one to look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visitor {
    pub(super) name: Option<String>,
    pub(super) may_look: bool,
    pub(super) may_see_payloads: bool,
    pub(super) may_act: bool,
}

impl Visitor {
    /// Somebody who may nothing.
    pub fn nobody() -> Self {
        Self { name: None, may_look: false, may_see_payloads: false, may_act: false }
    }

    /// Somebody with this name, under which acts are audited; without rights until they are given.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..Self::nobody() }
    }

    /// Adds the right to look at everything but payloads, keys and values of headers.
    #[must_use]
    pub fn may_look(mut self) -> Self {
        self.may_look = true;
        self
    }

    /// Adds the right to see payloads, keys and values of headers.
    #[must_use]
    pub fn may_see_payloads(mut self) -> Self {
        self.may_see_payloads = true;
        self.may_look()
    }

    /// Adds the right to act: replay, discard, release, pause, resume.
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

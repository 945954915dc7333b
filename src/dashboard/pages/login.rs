//! The login page: asks for the token, and for a name for the audit.

use std::sync::Arc;

use askama::Template;
use axum::Extension;
use axum::extract::{Form, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use serde::Deserialize;

use super::super::access::COOKIE;
use super::super::app::App;
use super::super::base::Base;
use super::super::guard::Visit;
use super::html;
use crate::store::Backend;

#[derive(Deserialize)]
pub(in super::super) struct NextQuery {
    #[serde(default)]
    next: String,
}

#[derive(Deserialize)]
pub(in super::super) struct LoginForm {
    token: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    next: String,
}

#[derive(Template)]
#[template(path = "login.html")]
struct LoginPage {
    base: Base,
    next: String,
    name: String,
    /// Why the visitor was not let in.
    problem: Option<&'static str>,
}

pub(in super::super) async fn page(
    Extension(visit): Extension<Visit>,
    Query(NextQuery { next }): Query<NextQuery>,
) -> Response {
    html(&LoginPage { base: visit.base, next, name: String::new(), problem: None })
}

pub(in super::super) async fn log_in<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Form(LoginForm { token, name, next }): Form<LoginForm>,
) -> Response {
    let session = match name.trim() {
        // Without a name, the audit would record the actor of the dashboard instead of the visitor.
        "" => Err((StatusCode::BAD_REQUEST, "A name is missing: the audit records who acts.")),
        name => app.access.log_in(&token, name).ok_or((StatusCode::UNAUTHORIZED, "The token is wrong.")),
    };
    let session = match session {
        Ok(session) => session,
        Err((status, problem)) => {
            let mut response = html(&LoginPage { base: visit.base, next, name, problem: Some(problem) });
            *response.status_mut() = status;
            return response;
        }
    };
    // Not `Secure`: this server does not know whether a proxy in front of it uses TLS, and without TLS the browser
    // would not send the cookie. There the token itself was sent without TLS too.
    let cookie = format!("{COOKIE}={session}; Path={}; HttpOnly; SameSite=Lax", visit.base.cookie_path());
    ([(header::SET_COOKIE, cookie)], Redirect::to(&visit.base.to(own_path(&next)))).into_response()
}

/// The page that the visitor requested, if it is a page of the dashboard.
fn own_path(next: &str) -> &str {
    // Browsers drop tabs and line ends from a URL, and read a backslash as a slash.
    let is_foreign = |character: char| character == '\\' || character.is_control();
    let is_own = next.starts_with('/') && !next.starts_with("//") && !next.contains(is_foreign);
    if is_own { next } else { "/" }
}

#[cfg(test)]
mod tests {
    use super::own_path;

    #[test]
    fn nobody_is_sent_elsewhere() {
        assert_eq!(own_path("/poisoned?handler=mail"), "/poisoned?handler=mail");
        for foreign in [
            "",
            "//evil.example",
            "https://evil.example",
            "/\\evil.example",
            "/\r\nx",
            "/\t/evil.example",
            "/\u{0}x",
            "javascript:alert(1)",
        ] {
            assert_eq!(own_path(foreign), "/", "{foreign}");
        }
    }
}

//! Asks for the token, and for a name under which acts are audited.

use std::sync::Arc;

use askama::Template;
use axum::Extension;
use axum::extract::{Form, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use serde::Deserialize;

use super::super::access::COOKIE;
use super::super::app::App;
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
    base: String,
    next: String,
    name: String,
    is_wrong: bool,
}

pub(in super::super) async fn page(
    Extension(visit): Extension<Visit>,
    Query(NextQuery { next }): Query<NextQuery>,
) -> Response {
    html(&LoginPage { base: visit.base, next, name: String::new(), is_wrong: false })
}

pub(in super::super) async fn log_in<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Form(LoginForm { token, name, next }): Form<LoginForm>,
) -> Response {
    let Some(session) = app.access.log_in(&token, name.trim()) else {
        let mut response = html(&LoginPage { base: visit.base, next, name, is_wrong: true });
        *response.status_mut() = StatusCode::UNAUTHORIZED;
        return response;
    };
    // Not `Secure`: behind a proxy that ends TLS this server cannot know, and without TLS the token itself is no safer.
    let path = if visit.base.is_empty() { "/" } else { &visit.base };
    let cookie = format!("{COOKIE}={session}; Path={path}; HttpOnly; SameSite=Lax");
    ([(header::SET_COOKIE, cookie)], Redirect::to(&format!("{}{}", visit.base, own_path(&next)))).into_response()
}

/// Back to where the visitor wanted to go, if that is a page of ours.
fn own_path(next: &str) -> &str {
    let is_own = next.starts_with('/') && !next.starts_with("//") && !next.contains(['\\', '\r', '\n']);
    if is_own { next } else { "/" }
}

#[cfg(test)]
mod tests {
    use super::own_path;

    #[test]
    fn nobody_is_sent_elsewhere() {
        assert_eq!(own_path("/poisoned?handler=mail"), "/poisoned?handler=mail");
        for foreign in
            ["", "//evil.example", "https://evil.example", "/\\evil.example", "/\r\nx", "javascript:alert(1)"]
        {
            assert_eq!(own_path(foreign), "/", "{foreign}");
        }
    }
}

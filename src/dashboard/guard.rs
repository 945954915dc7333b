//! Checks every request: a known host, the same origin or the token for writes, a visitor with the necessary right.
//! Adds security headers to every response.
//!
//! Another site cannot act here through a visitor's browser, because its requests have another origin (CSRF). It cannot
//! point its own host name here either, because only configured names are served (DNS rebinding).

use std::sync::Arc;

use askama::Template;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};

use super::access::Visitor;
use super::app::App;
use super::base::Base;
use super::refusal::Refusal;
use super::{assets, pages, text};
use crate::store::Backend;

/// Allows content from this server only, and no inline script or style.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                                       form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The visitor and the mount path, which each page gets.
#[derive(Clone)]
pub(super) struct Visit {
    pub(super) visitor: Visitor,
    pub(super) base: Base,
}

pub(super) fn router<B: Backend>(app: Arc<App<B>>) -> Router {
    Router::new()
        .route("/", get(pages::start::start))
        .route("/poisoned", get(pages::poisoned::poisoned))
        .route("/deliveries", get(pages::deliveries::deliveries))
        .route("/quarantine", get(pages::quarantine::quarantine))
        .route("/quarantine/record", get(pages::quarantine::record))
        .route("/message", get(pages::story::story))
        .route("/kafka", get(pages::kafka::kafka))
        .route("/processes", get(pages::processes::processes))
        .route("/audit", get(pages::audit::audit))
        .route("/act", get(pages::preview::preview).post(pages::act::act))
        .route("/jobs", get(pages::jobs::jobs))
        .route("/jobs/{id}", get(pages::jobs::job))
        .route("/jobs/{id}/stop", post(pages::jobs::stop))
        .route("/jobs/{id}/live", get(pages::live::of_job))
        .route("/live", get(pages::live::live))
        .route("/login", get(pages::login::page).post(pages::login::log_in))
        .route("/style.css", get(assets::style))
        .route("/script.js", get(assets::script))
        .route("/icon.svg", get(assets::icon))
        .fallback(async || Refusal::missing("there is no such page"))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), pass))
        .with_state(app)
}

async fn pass<B: Backend>(State(app): State<Arc<App<B>>>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let base = Base::of(&parts);
    let mut response = match admit(&app, &parts, &base) {
        Ok(visitor) => {
            parts.extensions.insert(Visit { visitor, base: base.clone() });
            next.run(Request::from_parts(parts, body)).await
        }
        Err(refusal) => *refusal,
    };
    if let Some(refusal) = response.extensions_mut().remove::<Refusal>() {
        response = refusal_page(&refusal, &base);
    }
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        // Not `no-referrer`: with it a browser hides the origin of a form POST from the same site too.
        (header::REFERRER_POLICY, "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The visitor, or why the request is refused.
fn admit<B: Backend>(app: &App<B>, parts: &Parts, base: &Base) -> Result<Visitor, Box<Response>> {
    let refuse = |refusal: Refusal| Box::new(refusal.into_response());
    let host = host(parts).unwrap_or_default();
    if !is_known_host(host, &app.hosts) {
        let what = "the dashboard is not served under this host name: use a configured name";
        return Err(refuse(Refusal::new(StatusCode::MISDIRECTED_REQUEST, what)));
    }
    let is_write = !matches!(parts.method, Method::GET | Method::HEAD);
    if is_write && !is_same_origin(&parts.headers, host) && !app.access.is_token_sent(&parts.headers) {
        return Err(refuse(Refusal::forbidden("an action must come from a page of this dashboard")));
    }
    let visitor = app.access.visitor(parts);
    let path = parts.uri.path();
    if ["/login", "/style.css", "/script.js", "/icon.svg"].contains(&path) {
        return Ok(visitor);
    }
    match (visitor.may_look, app.access.asks_for_a_token()) {
        (false, true) if !is_write && path != "/live" => {
            let wanted = parts.uri.path_and_query().map_or("/", |wanted| wanted.as_str());
            let login = format!("/login?next={}", text::encode(wanted));
            return Err(Box::new(Redirect::to(&base.to(&login)).into_response()));
        }
        (false, _) => return Err(refuse(Refusal::new(StatusCode::UNAUTHORIZED, "you have no right to view this"))),
        (true, _) => {}
    }
    if is_write && !visitor.may_act {
        return Err(refuse(Refusal::forbidden("you have no right to act")));
    }
    Ok(visitor)
}

fn host(parts: &Parts) -> Option<&str> {
    let header = parts.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    header.or_else(|| parts.uri.authority().map(|authority| authority.as_str()))
}

/// The name without its port.
fn name_of(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(address) => address.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    }
}

fn is_known_host(host: &str, hosts: &[String]) -> bool {
    let name = name_of(host).to_ascii_lowercase();
    let is_loopback =
        name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    is_loopback || hosts.contains(&name)
}

/// Browsers send `Sec-Fetch-Site` over HTTPS and to localhost, and `Origin` with every write. A request with neither
/// does not come from a page of the dashboard.
fn is_same_origin(headers: &HeaderMap, host: &str) -> bool {
    let said = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let is_from_here = |origin: &str| {
        origin
            .split_once("://")
            .is_some_and(|(scheme, from)| scheme.starts_with("http") && from.eq_ignore_ascii_case(host))
    };
    match (said("sec-fetch-site"), said("origin")) {
        (Some(site), Some(origin)) => site == "same-origin" && is_from_here(origin),
        (Some(site), None) => site == "same-origin",
        (None, Some(origin)) => is_from_here(origin),
        (None, None) => false,
    }
}

#[derive(Template)]
#[template(path = "refusal.html")]
struct RefusalPage<'a> {
    base: &'a Base,
    status: String,
    what: &'a str,
}

fn refusal_page(refusal: &Refusal, base: &Base) -> Response {
    let page = RefusalPage { base, status: refusal.status.to_string(), what: &refusal.what };
    let mut response = pages::html(&page);
    *response.status_mut() = refusal.status;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn a_write_is_taken_from_the_same_origin_only() {
        let host = "localhost:8088";
        for (pairs, is_taken) in [
            (&[][..], false),
            (&[("sec-fetch-site", "same-origin")], true),
            (&[("sec-fetch-site", "same-site")], false),
            (&[("sec-fetch-site", "cross-site"), ("origin", "http://localhost:8088")], false),
            (&[("sec-fetch-site", "none")], false),
            (&[("origin", "http://localhost:8088")], true),
            (&[("origin", "https://LOCALHOST:8088")], true),
            (&[("origin", "http://localhost:9999")], false),
            (&[("origin", "http://evil.example")], false),
            (&[("origin", "null")], false),
            (&[("sec-fetch-site", "same-origin"), ("origin", "http://evil.example")], false),
        ] {
            assert_eq!(is_same_origin(&headers(pairs), host), is_taken, "{pairs:?}");
        }
    }

    #[test]
    fn only_configured_host_names_are_served() {
        let hosts = ["inbox.example.com".to_owned()];
        for known in ["localhost", "LocalHost:8088", "127.0.0.1:1", "127.9.9.9", "[::1]:8088", "Inbox.Example.com:443"]
        {
            assert!(is_known_host(known, &hosts), "{known}");
        }
        for foreign in
            ["", "evil.example", "localhost.evil.example", "inbox.example.com.evil", "10.0.0.1:8088", "[::2]"]
        {
            assert!(!is_known_host(foreign, &hosts), "{foreign}");
        }
    }
}

//! The style sheet, the script and the icon. They are compiled in, so that nothing is loaded from other servers.

use axum::http::header;
use axum::response::{IntoResponse, Response};

const STYLE: &str = include_str!("assets/style.css");
const SCRIPT: &str = include_str!("assets/script.js");
const ICON: &str = include_str!("assets/icon.svg");

pub(super) async fn style() -> Response {
    asset(STYLE, "text/css; charset=utf-8")
}

pub(super) async fn script() -> Response {
    asset(SCRIPT, "text/javascript; charset=utf-8")
}

pub(super) async fn icon() -> Response {
    asset(ICON, "image/svg+xml")
}

/// The browser caches an asset for a few minutes only, because another build may have another version.
fn asset(text: &'static str, kind: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "private, max-age=300")], text).into_response()
}

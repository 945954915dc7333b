//! Why a page cannot be shown. The guard turns it into an error page.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::types::Error;

#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) what: String,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, what: impl Into<String>) -> Self {
        Self { status, what: what.into() }
    }

    /// The request is invalid.
    pub(super) fn wrong(what: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, what)
    }

    pub(super) fn missing(what: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, what)
    }

    pub(super) fn forbidden(what: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, what)
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let status = match () {
            () if error.is_configuration() => StatusCode::BAD_REQUEST,
            () if error.is_transient() => StatusCode::SERVICE_UNAVAILABLE,
            () => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, format!("{error:#}"))
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

//! Where the dashboard is mounted, and the URLs of its pages there. Every link and redirect to the start page is built
//! here: axum serves the `/` of a router that is nested at `/inbox` as `/inbox`, and `/inbox/` leads to no page.

use std::fmt;

use axum::extract::{NestedPath, OriginalUri};
use axum::http::request::Parts;

/// The path that the dashboard is nested at. Formatted, it has no slash at its end, and is empty at the root.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Base {
    path: String,
    /// Whether the start page has a slash at its end: at the root, or nested at a path with one.
    is_start_slashed: bool,
}

impl Base {
    /// The part of the path that an outer router has stripped.
    pub(super) fn of(parts: &Parts) -> Self {
        let inner = parts.uri.path();
        let outer = parts.extensions.get::<OriginalUri>().map_or(inner, |original| original.path());
        let path = outer.strip_suffix(inner).unwrap_or(outer).trim_end_matches('/').to_owned();
        let is_nested_slashed = parts.extensions.get::<NestedPath>().is_some_and(|at| at.as_str().ends_with('/'));
        Self { is_start_slashed: path.is_empty() || is_nested_slashed, path }
    }

    /// The URL of a page of the dashboard. Its path begins with `/`, and may have a query and a fragment.
    pub(super) fn to(&self, page: &str) -> String {
        let start = page.strip_prefix('/').filter(|rest| rest.is_empty() || rest.starts_with(['?', '#']));
        match start {
            Some(rest) if !self.is_start_slashed => format!("{}{rest}", self.path),
            Some(_) | None => format!("{}{page}", self.path),
        }
    }

    /// The `Path` of a cookie that every page gets.
    pub(super) fn cookie_path(&self) -> &str {
        if self.path.is_empty() { "/" } else { &self.path }
    }
}

impl fmt::Display for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_start_page_loses_its_slash_and_only_where_the_mount_path_has_none() {
        let root = Base { path: String::new(), is_start_slashed: true };
        let nested = Base { path: "/inbox".to_owned(), is_start_slashed: false };
        let slashed = Base { path: "/inbox".to_owned(), is_start_slashed: true };
        for (page, at_root, at_nested, at_slashed) in [
            ("/", "/", "/inbox", "/inbox/"),
            (
                "/?result=pause-1#handlers",
                "/?result=pause-1#handlers",
                "/inbox?result=pause-1#handlers",
                "/inbox/?result=pause-1#handlers",
            ),
            ("/#handlers", "/#handlers", "/inbox#handlers", "/inbox/#handlers"),
            (
                "/poisoned?handler=a/?b",
                "/poisoned?handler=a/?b",
                "/inbox/poisoned?handler=a/?b",
                "/inbox/poisoned?handler=a/?b",
            ),
        ] {
            assert_eq!([root.to(page), nested.to(page), slashed.to(page)], [at_root, at_nested, at_slashed]);
        }
    }
}

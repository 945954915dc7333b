//! Rewrites database URLs: replaces the database or the address, and keeps the rest (user, password, parameters).

/// `url` with its database replaced.
pub fn with_database(url: &str, database: &str) -> String {
    let parts = Parts::of(url);
    format!("{}{}/{database}{}", parts.scheme_and_user, parts.address, parts.parameters)
}

/// `url` with its host and port replaced by 127.0.0.1 and `port`.
pub fn with_port(url: &str, port: u16) -> String {
    let parts = Parts::of(url);
    format!("{}127.0.0.1:{port}{}{}", parts.scheme_and_user, parts.path, parts.parameters)
}

/// `scheme://user@` `host:port` `/database` `?parameters`
struct Parts<'a> {
    scheme_and_user: &'a str,
    address: &'a str,
    path: &'a str,
    parameters: &'a str,
}

impl<'a> Parts<'a> {
    fn of(url: &'a str) -> Parts<'a> {
        let scheme_end = url.find("://").unwrap_or_else(|| panic!("a database URL needs a scheme")) + 3;
        let parameters_start = url.find('?').unwrap_or(url.len());
        let path_start =
            url[scheme_end..parameters_start].find('/').map_or(parameters_start, |slash| scheme_end + slash);
        // A password may contain an `@`, a host cannot: the last one counts.
        let address_start = url[scheme_end..path_start].rfind('@').map_or(scheme_end, |at| scheme_end + at + 1);
        Parts {
            scheme_and_user: &url[..address_start],
            address: &url[address_start..path_start],
            path: &url[path_start..parameters_start],
            parameters: &url[parameters_start..],
        }
    }
}

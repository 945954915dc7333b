//! Passwords that change while a pool is open: fetched for each new connection, from a function or a file.
//!
//! No password appears in an error or a `Debug` output.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, TryFutureExt};
use tokio_postgres::Config;
use tokio_postgres::config::Host;

use super::connect::PostgresOptions;

/// The user's function. It may fail or panic: then the connection is not opened.
type Provider = dyn Fn() -> BoxFuture<'static, Result<String, Box<dyn StdError + Send + Sync>>> + Send + Sync;

/// Where the password of a new connection comes from, if not from the URL.
#[derive(Clone)]
pub(super) enum Password {
    Function(Arc<Provider>),
    /// The whole file is the password, except for a final line break.
    File(PathBuf),
    /// Lines of `host:port:database:user:password`, as libpq reads them.
    Passfile(PathBuf),
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(_) => f.write_str("a function"),
            Self::File(path) | Self::Passfile(path) => write!(f, "{}", path.display()),
        }
    }
}

impl PostgresOptions {
    /// Calls a function for the password of each new connection, instead of the one in the URL: for passwords and
    /// tokens that expire while the pool is open. Open sessions continue. The function must not block: it runs on the
    /// store's own thread, and for connections of transactional handlers on their runtime. Its time counts towards
    /// [`connect_timeout`](#structfield.connect_timeout). If it fails, the connection fails with its error, so the
    /// error must not contain the password. Default: the password of the URL.
    ///
    /// ```
    /// # async fn sign_token(_host: &str, _user: &str) -> Result<String, std::io::Error> { Ok(String::new()) }
    /// # async fn example() -> wharf::Result<()> {
    /// use wharf::store::PostgresOptions;
    /// use wharf::{Postgres, Store};
    ///
    /// // For RDS: `aws_sdk_rds::auth_token::AuthTokenGenerator`; for Cloud SQL: an OAuth2 access token of the service account.
    /// let options = PostgresOptions::default().password_from(|| sign_token("db.example.com", "shop"));
    /// let store = Store::<Postgres>::connect_with("postgres://shop@db.example.com/shop?sslmode=verify-full", options).await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn password_from<F, P, E>(mut self, provider: F) -> Self
    where
        F: Fn() -> P + Send + Sync + 'static,
        P: Future<Output = Result<String, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    {
        self.password = Some(Password::Function(Arc::new(move || provider().map_err(Into::into).boxed())));
        self
    }

    /// Reads the password of each new connection from a file, instead of the one in the URL: for example a mounted
    /// secret that is renewed. The whole file is the password, except for a final line break. Default: the password of
    /// the URL. For a file with a line per server, as in libpq, put `passfile=FILE` into the URL.
    ///
    /// ```
    /// use wharf::store::PostgresOptions;
    ///
    /// let options = PostgresOptions::default().password_file("/run/secrets/shop-database");
    /// ```
    #[must_use]
    pub fn password_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.password = Some(Password::File(path.into()));
        self
    }
}

impl Password {
    /// Sets the password of the next connection, which is tried with these hosts in turn. Fails if there is none. In a
    /// password file each host may have its own line. A host without one is tried as it is, if another host has one.
    pub(super) async fn give_to(&self, hosts: &mut [Config]) -> Result<(), String> {
        let password = match self {
            Self::Function(provider) => provider().await.map_err(|error| format!("cannot get a password: {error}"))?,
            Self::File(path) => read(path).await?.trim_end_matches(['\r', '\n']).to_owned(),
            Self::Passfile(path) => {
                return match give_lines(&read(path).await?, hosts) {
                    0 => Err(format!("no line of {} matches this server, database and user", path.display())),
                    _ => Ok(()),
                };
            }
        };
        for host in hosts {
            host.password(&password);
        }
        Ok(())
    }
}

/// Reads a file on a thread for blocking work: the store's thread must not wait for a disk.
async fn read(path: &Path) -> Result<String, String> {
    let owned = path.to_owned();
    let text = tokio::task::spawn_blocking(move || std::fs::read_to_string(owned)).await;
    match text {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => Err(format!("cannot read a password from {}: {error}", path.display())),
        Err(_) => Err(format!("cannot read a password from {}", path.display())),
    }
}

/// Hosts and ports of a configuration, in order.
pub(super) fn places(config: &Config) -> impl Iterator<Item = (String, u16)> {
    let ports = config.get_ports();
    let port = |at: usize| ports.get(at).or(ports.first()).copied().unwrap_or(5432);
    config.get_hosts().iter().enumerate().map(move |(at, host)| match host {
        Host::Tcp(host) => (host.clone(), port(at)),
        Host::Unix(path) => (path.display().to_string(), port(at)),
    })
}

/// Sets the passwords of the hosts that have a line in this password file; returns their number.
fn give_lines(text: &str, hosts: &mut [Config]) -> usize {
    let mut given = 0;
    for host in hosts {
        let found = places(host).find_map(|(name, port)| in_passfile(text, &name, port, host));
        if let Some(password) = found {
            host.password(password);
            given += 1;
        }
    }
    given
}

/// The password of the first line that matches. `*` matches anything; `\` escapes a colon and itself.
fn in_passfile(text: &str, host: &str, port: u16, config: &Config) -> Option<String> {
    let user = config.get_user().unwrap_or_default();
    let database = config.get_dbname().unwrap_or(user);
    // `localhost` also matches a Unix socket.
    let host = if host.starts_with('/') { "localhost" } else { host };
    let wanted = [host, &port.to_string(), database, user];
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let fields = fields(line);
        let (password, places) = fields.split_last()?;
        let fits = |(place, wanted): (&String, &&str)| place == "*" || place == wanted;
        (places.len() == wanted.len() && places.iter().zip(&wanted).all(fits)).then(|| password.clone())
    })
}

/// The fields of a line of a password file, unescaped.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        // The password is the rest of the line, and may contain colons.
        match (letter, fields.len()) {
            (':', 1..5) => fields.push(String::new()),
            (letter, _) => {
                let letter = if letter == '\\' { letters.next().unwrap_or('\\') } else { letter };
                if let Some(field) = fields.last_mut() {
                    field.push(letter);
                }
            }
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<String> {
        let config: Config = "postgres://shop@db:5433/orders".parse().unwrap();
        in_passfile(text, "db", 5433, &config)
    }

    #[test]
    fn the_first_matching_line_of_a_passfile_applies() {
        let text = "# a comment\ndb:5432:*:*:no\ndb:5433:orders:shop:yes\n*:*:*:*:late";
        assert_eq!(found(text).as_deref(), Some("yes"));
        assert_eq!(found("*:*:*:*:any\n").as_deref(), Some("any"));
        assert_eq!(found("other:*:*:*:no\n:\n\n"), None);
    }

    #[test]
    fn each_host_of_a_url_has_its_own_line() {
        let mut hosts = ["db1", "db2", "db3"].map(|host| format!("postgres://shop@{host}/orders").parse().unwrap());
        assert_eq!(give_lines("db2:*:*:*:two\ndb1:*:*:*:one\n", &mut hosts), 2);
        let passwords = hosts.each_ref().map(|host: &Config| host.get_password());
        assert_eq!(passwords, [Some(&b"one"[..]), Some(b"two"), None]);
    }

    #[test]
    fn colons_and_backslashes_are_escaped_and_a_password_may_have_colons() {
        assert_eq!(found(r"*:*:*:shop:a\:b\\c:d").as_deref(), Some(r"a:b\c:d"));
        assert_eq!(found(r"*:*:*:sh\op:x").as_deref(), Some("x"));
    }
}

//! The hosts of a database URL, one at a time, so that each gets its own time.

use diesel::ConnectionError;
use rand::seq::SliceRandom;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts};

use super::password::places;

/// One configuration for each host, in the order in which they are tried. They differ in the host only.
pub(super) fn each(config: &Config) -> Vec<Config> {
    let hosts = config.get_hosts().len().max(config.get_hostaddrs().len());
    let ports = config.get_ports();
    let is_odd = ports.len() > 1 && ports.len() != hosts
        || !config.get_hosts().is_empty()
            && !config.get_hostaddrs().is_empty()
            && config.get_hosts().len() != config.get_hostaddrs().len();
    // With one host there is nothing to separate; the driver itself refuses lists that do not fit.
    if hosts <= 1 || is_odd {
        return vec![config.clone()];
    }
    let mut each: Vec<Config> = (0..hosts).map(|at| only(config, at)).collect();
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        each.shuffle(&mut rand::rng());
    }
    each
}

/// The configuration with the host at this place only. The driver cannot remove a host, so everything else is copied.
fn only(config: &Config, at: usize) -> Config {
    let mut one = Config::new();
    match config.get_hosts().get(at) {
        Some(Host::Tcp(host)) => {
            one.host(host);
        }
        Some(Host::Unix(path)) => {
            one.host_path(path);
        }
        None => {}
    }
    if let Some(address) = config.get_hostaddrs().get(at) {
        one.hostaddr(*address);
    }
    if let Some(port) = config.get_ports().get(at).or(config.get_ports().first()) {
        one.port(*port);
    }
    if let Some(user) = config.get_user() {
        one.user(user);
    }
    if let Some(password) = config.get_password() {
        one.password(password);
    }
    if let Some(database) = config.get_dbname() {
        one.dbname(database);
    }
    if let Some(options) = config.get_options() {
        one.options(options);
    }
    if let Some(name) = config.get_application_name() {
        one.application_name(name);
    }
    if let Some(timeout) = config.get_connect_timeout() {
        one.connect_timeout(*timeout);
    }
    if let Some(timeout) = config.get_tcp_user_timeout() {
        one.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = config.get_keepalives_interval() {
        one.keepalives_interval(interval);
    }
    if let Some(retries) = config.get_keepalives_retries() {
        one.keepalives_retries(retries);
    }
    one.keepalives(config.get_keepalives())
        .keepalives_idle(config.get_keepalives_idle())
        .ssl_mode(config.get_ssl_mode())
        .ssl_negotiation(config.get_ssl_negotiation())
        .target_session_attrs(config.get_target_session_attrs())
        .channel_binding(config.get_channel_binding())
        .load_balance_hosts(config.get_load_balance_hosts());
    one
}

/// The errors of all hosts; with the host, if there are several.
pub(super) fn joined(errors: Vec<(Config, ConnectionError)>) -> String {
    let text = |error: ConnectionError| match error {
        ConnectionError::BadConnection(text) => text,
        other => other.to_string(),
    };
    let are_several = errors.len() > 1;
    let errors = errors.into_iter().map(|(config, error)| match (are_several, places(&config).next()) {
        (true, Some((host, port))) => format!("{host}:{port}: {}", text(error)),
        (true, None) | (false, _) => text(error),
    });
    errors.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_keeps_every_setting_but_the_other_hosts() {
        let url = "postgres://shop:secret@db1:5433,db2:5434/orders?target_session_attrs=read-write&options=-cjit%3Doff\
                   &connect_timeout=7&keepalives_idle=11&channel_binding=disable&sslmode=require&application_name=us";
        let parsed = |hosts: &str| url.replace("db1:5433,db2:5434", hosts).parse::<Config>().unwrap();
        assert_eq!(each(&parsed("db1:5433,db2:5434")), [parsed("db1:5433"), parsed("db2:5434")]);
        assert_eq!(each(&parsed("db1:5433")), [parsed("db1:5433")]);
    }
}

//! Free ports of 127.0.0.1 that stay reserved while a server is down.
//!
//! A port is taken below the range that the kernel uses for outgoing connections. Otherwise a client could take the
//! port of a stopped server, and a client that dials an unused port of that range can end up connected to itself.

use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{LazyLock, Mutex};

/// Below `net.ipv4.ip_local_port_range` (32768 by default) and above what services use.
const RANGE: std::ops::Range<u16> = 20_000..32_000;

/// Ports already used by this process: they are never reused, because their server may be down only temporarily.
static GIVEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);

/// A port that nothing listens on. Another process may still take it first, so the caller must be able to try again.
pub fn free_port() -> u16 {
    let mut given = GIVEN.lock().expect("nothing panics while holding the ports");
    for _ in 0..RANGE.len() {
        let port = rand::random_range(RANGE);
        if !given.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            given.insert(port);
            return port;
        }
    }
    panic!("no free port in {RANGE:?}");
}

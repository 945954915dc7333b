//! Free ports of 127.0.0.1 that stay ours while a server is down.
//!
//! A port is taken below the range the kernel gives to outgoing connections. A server that is stopped and started
//! again would otherwise find its port held by some client, and a client that dials a dead port of that range can end
//! up connected to itself.

use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{LazyLock, Mutex};

/// Below `net.ipv4.ip_local_port_range` (32768 by default) and above what services use.
const RANGE: std::ops::Range<u16> = 20_000..32_000;

/// Ports already given out by this process: never again, their server may only be down for now.
static GIVEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);

/// A port nothing listens on. Another process may still be faster, so whoever binds it must be ready to ask again.
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

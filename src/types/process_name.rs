//! The name of this process for operators.

/// Host and process id, as in `inbox_processor` and `inbox_ingest`.
pub(crate) fn process_name() -> String {
    let host = std::env::var("HOSTNAME").ok().or_else(|| std::fs::read_to_string("/etc/hostname").ok());
    let host = host.map(|host| host.trim().to_owned()).filter(|host| !host.is_empty());
    format!("{}/{}", host.as_deref().unwrap_or("unknown"), std::process::id())
}

//! `dashboard`: serves the inbox in a browser. A loopback address needs no token. Every other address needs one, which
//! comes from a file or the environment, never from the command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tokio::net::TcpListener;
use wharf::dashboard::{Access, Dashboard};
use wharf::store::Backend;

use crate::decoded::RegistryOptions;
use crate::exit::{Exit, Failure};
use crate::session::Session;

const TOKEN_VARIABLE: &str = "WHARF_DASHBOARD_TOKEN";

/// Where the dashboard is served, and to whom.
#[derive(Debug, Args)]
pub struct DashboardArguments {
    /// The address and port to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8088")]
    listen: SocketAddr,
    /// A file that holds the login token. Without it, WHARF_DASHBOARD_TOKEN is used. Required if other machines can
    /// reach the address
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// A host name under which browsers reach it, besides localhost and the address; can be repeated
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    #[command(flatten)]
    registry: RegistryOptions,
}

pub async fn run<B: Backend>(session: &Session<B>, arguments: &DashboardArguments) -> Result<Exit, Failure> {
    let access = match arguments.token()? {
        Some(token) => Access::by_token(token)?,
        None if arguments.listen.ip().is_loopback() => Access::on_this_machine(),
        None => {
            return Err(Failure::usage(format!(
                "other machines can reach {}: put a token into a file for --token-file, or into {TOKEN_VARIABLE}",
                arguments.listen
            )));
        }
    };
    let decoder = arguments.registry.decoder()?;
    let cannot = |error| Failure::Told(Exit::Connection, format!("cannot listen on {}: {error}", arguments.listen));
    let listener = TcpListener::bind(arguments.listen).await.map_err(cannot)?;
    let url = format!("http://{}/", listener.local_addr().map_err(cannot)?);
    match session.output.is_json {
        true => session.output.document(&json!({ "url": url }))?,
        false => session.output.line(format!("the dashboard is at {url} until you press Ctrl-C"))?,
    }
    let dashboard = Dashboard::new(&session.store, access).acting_as(&session.actor).decoded_by(decoder);
    arguments.hosts.iter().fold(dashboard, Dashboard::host).serve(listener).await?;
    Ok(Exit::Well)
}

impl DashboardArguments {
    fn token(&self) -> Result<Option<String>, Failure> {
        if let Some(path) = &self.token_file {
            let token = std::fs::read_to_string(path)
                .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))?;
            return Ok(Some(token));
        }
        Ok(std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.trim().is_empty()))
    }
}

//! Decodes payloads and keys to show them: with a schema registry, and CloudEvents also without one. The registry's
//! secrets come from the environment or from a file, never from the command line.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use wharf::Record;
use wharf::formats::{AnyFormat, Decoder, Encoded, Readable, Registry};

use crate::exit::Failure;
use crate::output::{Output, verbatim};
use crate::record::PayloadOption;

/// The schema registry for what is shown.
#[derive(Debug, Args)]
pub struct RegistryOptions {
    /// Decode payload and key with the schemas of this registry (Avro, Protobuf, JSON Schema; the data of CloudEvents).
    /// Secrets: WHARF_REGISTRY_PASSWORD or WHARF_REGISTRY_TOKEN, or a file
    #[arg(long, value_name = "URL")]
    registry: Option<String>,
    /// The user name for the registry
    #[arg(long, value_name = "NAME", requires = "registry")]
    registry_user: Option<String>,
    /// A file with the registry's password, or with its token without --registry-user
    #[arg(long, value_name = "FILE", requires = "registry")]
    registry_secret_file: Option<PathBuf>,
    /// A file of PEM root certificates for the registry's TLS
    #[arg(long, value_name = "FILE", requires = "registry")]
    registry_ca: Option<PathBuf>,
}

/// How to decode payloads and keys of a command that shows them on request.
#[derive(Debug, Args)]
#[command(mut_arg("registry", |registry| registry.requires("is_shown")))]
pub struct DecodingOptions {
    #[command(flatten)]
    registry: RegistryOptions,
}

/// The decoded key and payload; `None` where there is nothing to decode: no frame of the Confluent wire format, and no
/// event.
#[derive(Debug, Default)]
pub struct Decoded {
    has_registry: bool,
    key: Option<Result<Value, String>>,
    payload: Option<Result<Value, String>>,
}

impl DecodingOptions {
    /// Decodes what is shown of a record.
    pub async fn decode(&self, record: Option<&Record>, payload: PayloadOption) -> Result<Decoded, Failure> {
        let Some(record) = record.filter(|_| payload.is_shown()) else { return Ok(Decoded::default()) };
        let (decoder, encoded) = (self.registry.decoder()?, Encoded::of(record));
        let (key, payload) = (one(&decoder, &encoded.of_key()).await, one(&decoder, &encoded).await);
        Ok(Decoded { has_registry: self.registry.registry.is_some(), key, payload })
    }
}

impl RegistryOptions {
    /// Decodes CloudEvents, and with a registry everything that it has schemas for.
    pub fn decoder(&self) -> Result<AnyFormat, Failure> {
        Ok(match self.registry.as_deref() {
            Some(url) => AnyFormat::new().registry(&self.registry_at(url)?),
            None => AnyFormat::new(),
        })
    }

    fn registry_at(&self, url: &str) -> Result<Registry, Failure> {
        let mut registry = Registry::at(url);
        if let Some(file) = &self.registry_ca {
            registry = registry.root_certificates(file);
        }
        let secret = self.registry_secret_file.as_deref().map(read_secret).transpose()?;
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        registry = match &self.registry_user {
            Some(user) => match secret.or_else(|| variable("WHARF_REGISTRY_PASSWORD")) {
                Some(password) => registry.basic_auth(user, password),
                None => {
                    return Err(Failure::usage(
                        "--registry-user needs a password: set WHARF_REGISTRY_PASSWORD, or use --registry-secret-file",
                    ));
                }
            },
            None => match secret.or_else(|| variable("WHARF_REGISTRY_TOKEN")) {
                Some(token) => registry.bearer_token(token),
                None => registry,
            },
        };
        registry.build().map_err(|error| Failure::usage(format!("{error:#}")))
    }
}

fn read_secret(file: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| Failure::usage(format!("cannot read {}: {error}", file.display())))?;
    Ok(text.trim().to_owned())
}

async fn one(decoder: &AnyFormat, encoded: &Encoded<'_>) -> Option<Result<Value, String>> {
    let decoding = async {
        if let Some(ready) = decoder.ready(encoded) {
            ready.await?;
        }
        decoder.decode(encoded)
    };
    match decoding.await {
        Ok(decoded) => decoded.map(|Readable { value, .. }| Ok(value)),
        Err(undecoded) => Some(Err(undecoded.to_string())),
    }
}

impl Decoded {
    /// Prints them, below everything else.
    pub fn print(&self, output: Output) -> io::Result<()> {
        for (what, decoded) in [("key", &self.key), ("payload", &self.payload)] {
            match decoded {
                Some(Ok(value)) => {
                    output.line("")?;
                    output.line(format!("decoded {what}:"))?;
                    for line in serde_json::to_string_pretty(value).unwrap_or_default().lines() {
                        verbatim(line)?;
                    }
                }
                Some(Err(error)) => {
                    output.line("")?;
                    output.line(format!("the {what} cannot be decoded: {error}"))?;
                }
                None if self.has_registry && what == "payload" => {
                    output.line("")?;
                    output.line("the payload has no schema id of the Confluent wire format")?;
                }
                None => {}
            }
        }
        Ok(())
    }

    pub fn document(&self) -> Value {
        let part = |part: &Option<Result<Value, String>>| match part {
            None => Value::Null,
            Some(Ok(value)) => json!({ "value": value }),
            Some(Err(error)) => json!({ "error": error }),
        };
        match self.has_registry || self.payload.is_some() {
            false => Value::Null,
            true => json!({ "key": part(&self.key), "payload": part(&self.payload) }),
        }
    }
}

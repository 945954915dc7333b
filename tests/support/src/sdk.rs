//! The signatures of cloud SDKs for Rust that the documentation calls, so that its code is compiled without them. None
//! of these functions does anything.
#![allow(clippy::unused_self, reason = "the SDKs have these signatures")]

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

type Answer<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send + 'a>>;
type BoxError = Box<dyn Error + Send + Sync>;

pub mod aws_config {
    pub struct BehaviorVersion;
    pub struct Region;
    pub struct SdkConfig;

    impl BehaviorVersion {
        pub fn latest() -> Self {
            Self
        }
    }

    impl Region {
        pub fn new(_: &'static str) -> Self {
            Self
        }
    }

    pub async fn load_defaults(_: BehaviorVersion) -> SdkConfig {
        SdkConfig
    }
}

pub mod aws_msk_iam_sasl_signer {
    use super::{BoxError, aws_config};

    /// The token, and its expiry in milliseconds since 1970.
    pub async fn generate_auth_token(_: aws_config::Region) -> Result<(String, i64), BoxError> {
        Ok((String::new(), 0))
    }
}

pub mod aws_sdk_rds {
    pub mod auth_token {
        use super::super::{BoxError, aws_config};

        pub struct Config;
        pub struct Builder;
        pub struct AuthToken(String);
        pub struct AuthTokenGenerator;

        impl Config {
            pub fn builder() -> Builder {
                Builder
            }
        }

        impl Builder {
            #[must_use]
            pub fn hostname(self, _: impl Into<String>) -> Self {
                self
            }

            #[must_use]
            pub fn port(self, _: u64) -> Self {
                self
            }

            #[must_use]
            pub fn username(self, _: impl Into<String>) -> Self {
                self
            }

            pub fn build(self) -> Result<Config, BoxError> {
                Ok(Config)
            }
        }

        impl AuthToken {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl AuthTokenGenerator {
            pub fn new(_: Config) -> Self {
                Self
            }

            pub async fn auth_token(&self, _: &aws_config::SdkConfig) -> Result<AuthToken, BoxError> {
                Ok(AuthToken(String::new()))
            }
        }
    }
}

pub mod azure_core {
    pub mod credentials {
        use super::super::{Answer, SystemTime};

        pub struct Secret(String);

        impl Secret {
            pub fn secret(&self) -> &str {
                &self.0
            }
        }

        pub struct AccessToken {
            pub token: Secret,
            pub expires_on: SystemTime,
        }

        pub struct TokenRequestOptions;

        pub trait TokenCredential: Send + Sync {
            fn get_token<'a>(
                &'a self,
                scopes: &'a [&'a str],
                options: Option<TokenRequestOptions>,
            ) -> Answer<'a, AccessToken>;
        }
    }
}

pub mod gcp_auth {
    use super::{Answer, Arc};

    pub struct Token(String);
    pub struct DateTime(i64);

    impl Token {
        pub fn as_str(&self) -> &str {
            &self.0
        }

        pub fn expires_at(&self) -> DateTime {
            DateTime(0)
        }
    }

    impl DateTime {
        pub fn timestamp(&self) -> i64 {
            self.0
        }
    }

    pub trait TokenProvider: Send + Sync {
        fn token<'a>(&'a self, scopes: &'a [&'a str]) -> Answer<'a, Arc<Token>>;
    }
}

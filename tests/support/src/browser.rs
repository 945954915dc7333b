//! A real headless Chromium, driven over WebDriver by Debian's `chromedriver`: it clicks, types, reads the visible
//! text, and reports what the page logged and which URLs it requested.
//!
//! The crate `thirtyfour` implements the protocol. This module adds what the tests need: waiting for texts on a live
//! page, and the choice of the emulated device.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use base64::prelude::{BASE64_STANDARD, Engine};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use thirtyfour::cdp::domains::emulation::{MediaFeature, SetEmulatedMedia};
use thirtyfour::prelude::{By, ChromiumLikeCapabilities, DesiredCapabilities, WebDriver, WebDriverResult};
use thirtyfour::{ChromeCapabilities, LoggingPrefsLogLevel};

use crate::process::{PROCESS_DEADLINE, bound_command, spawn_bound};

/// The interval between two reads of a page.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const SWITCHES: [&str; 9] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
];

/// Whether pages may run scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scripts {
    On,
    Off,
}

/// The device that a page is displayed on.
#[derive(Debug, Clone, Copy)]
pub enum Look {
    Light,
    Dark,
    /// As narrow as a phone, with the light theme.
    Phone,
}

/// A separate browser with an empty profile; closed when dropped.
pub struct Browser {
    driver: WebDriver,
}

impl Browser {
    pub async fn start(scripts: Scripts) -> Browser {
        let capabilities = capabilities(scripts).expect("these are JSON");
        let builder = WebDriver::builder(DRIVER.as_str(), capabilities).request_timeout(PROCESS_DEADLINE);
        let driver = builder.connect().await.expect("chromium starts: run scripts/setup");
        driver.set_page_load_timeout(PROCESS_DEADLINE).await.expect("the timeout is set");
        let browser = Browser { driver };
        browser.show(Look::Light).await;
        browser
    }

    pub async fn go(&self, url: &str) {
        self.driver.goto(url).await.unwrap_or_else(|error| panic!("cannot open {url}: {error}"));
    }

    pub async fn url(&self) -> String {
        self.driver.current_url().await.expect("a page is open").into()
    }

    /// Waits for the first link or button whose text begins with `name`, and clicks it.
    pub async fn click(&self, name: &str) {
        let path = format!("//*[self::a or self::button][starts-with(normalize-space(.), \"{name}\")]");
        self.click_at(By::XPath(path)).await;
    }

    /// Waits for the first element that matches a CSS selector, and clicks it.
    pub async fn click_on(&self, selector: &str) {
        self.click_at(By::Css(selector.to_owned())).await;
    }

    async fn click_at(&self, by: By) {
        let deadline = Instant::now() + PROCESS_DEADLINE;
        loop {
            // A live page may replace the element that was just found.
            let clicked = async { self.driver.find(by.clone()).await?.click().await };
            match clicked.await {
                Ok(()) => return,
                Err(error) if Instant::now() > deadline => {
                    panic!("cannot click {by:?}: {error}\n{}", self.text().await)
                }
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Types into the field that matches a CSS selector.
    pub async fn write(&self, selector: &str, value: &str) {
        let written = async { self.driver.find(By::Css(selector.to_owned())).await?.send_keys(value).await };
        written.await.unwrap_or_else(|error| panic!("cannot write into {selector}: {error}"));
    }

    /// Presses a key in the focused element; `\u{e004}` is Tab, `\u{e007}` is Enter.
    pub async fn press(&self, key: char) {
        // By default, the crate adds a mouse action of a quarter of a second to every key.
        let keyboard = self.driver.action_chain_with_delay(None, Some(Duration::ZERO));
        keyboard.key_down(key).key_up(key).perform().await.expect("the key is pressed");
    }

    /// Runs a script through WebDriver, not as a script of the page, and returns its result.
    pub async fn ask(&self, script: &str) -> Value {
        let returned = self.driver.execute(script, Vec::new()).await;
        returned.unwrap_or_else(|error| panic!("{script}: {error}")).json().clone()
    }

    /// The visible text of the page; empty during navigation, when the body is missing or was just replaced.
    pub async fn text(&self) -> String {
        let text = async { self.driver.find(By::Css("body")).await?.text().await };
        text.await.unwrap_or_default()
    }

    /// Waits until the page shows this text. Returns all visible text.
    pub async fn until(&self, wanted: &str) -> String {
        let deadline = Instant::now() + PROCESS_DEADLINE;
        loop {
            let shown = self.text().await;
            if shown.contains(wanted) {
                return shown;
            }
            assert!(Instant::now() < deadline, "{wanted:?} is not shown at {}:\n{shown}", self.url().await);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// The warnings and errors that pages have logged since the last call.
    pub async fn complaints(&self) -> Vec<String> {
        let entries = self.driver.browser_log().await.expect("a log");
        let complaints = entries.into_iter().filter(|entry| entry.level != "INFO" && entry.level != "DEBUG");
        complaints.map(|entry| entry.message).collect()
    }

    /// The URLs requested since the last call.
    pub async fn requested(&self) -> Vec<String> {
        let entries = self.driver.get_log("performance").await.expect("a log");
        let url = |message: &str| -> Option<String> {
            let event: Value = serde_json::from_str(message).ok()?;
            let is_request = event["message"]["method"] == "Network.requestWillBeSent";
            is_request.then(|| event["message"]["params"]["request"]["url"].as_str().unwrap_or_default().to_owned())
        };
        entries.iter().filter_map(|entry| url(&entry.message)).collect()
    }

    pub async fn show(&self, look: Look) {
        let (width, height, scheme) = match look {
            Look::Light => (1280, 900, "light"),
            Look::Dark => (1280, 900, "dark"),
            Look::Phone => (390, 844, "light"),
        };
        let devtools = self.driver.cdp();
        let scheme = MediaFeature { name: "prefers-color-scheme".to_owned(), value: scheme.to_owned() };
        let media = SetEmulatedMedia { media: None, features: Some(vec![scheme]) };
        devtools.send(media).await.expect("the scheme is set");
        let is_phone = matches!(look, Look::Phone);
        let sized = devtools.emulation().set_device_metrics_override(width, height, 1.0, is_phone).await;
        sized.expect("the size is set");
    }

    /// Saves a screenshot of the whole page, including the part below the window.
    pub async fn picture(&self, path: &Path) {
        let devtools = self.driver.cdp();
        let metrics = devtools.send_raw("Page.getLayoutMetrics", ()).await.expect("the size of the page");
        let size = &metrics["cssContentSize"];
        let clip = json!({ "x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1 });
        let wanted = json!({ "format": "png", "captureBeyondViewport": true, "clip": clip });
        let picture = devtools.send_raw("Page.captureScreenshot", wanted).await.expect("a picture");
        let bytes = BASE64_STANDARD.decode(picture["data"].as_str().expect("its data")).expect("base64");
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("the folder for pictures");
        std::fs::write(path, bytes).expect("the picture is written");
    }
}

fn capabilities(scripts: Scripts) -> WebDriverResult<ChromeCapabilities> {
    let mut chrome = DesiredCapabilities::chrome();
    for switch in SWITCHES {
        chrome.add_arg(switch)?;
    }
    let javascript = if scripts == Scripts::On { 1 } else { 2 };
    let settings = json!({ "profile.managed_default_content_settings.javascript": javascript });
    chrome.add_experimental_option("prefs", settings)?;
    for log in ["browser", "performance"] {
        chrome.set_logging_prefs(log, LoggingPrefsLogLevel::All)?;
    }
    Ok(chrome)
}

/// The URL of the driver, one per test process.
static DRIVER: LazyLock<String> = LazyLock::new(|| {
    let mut command = bound_command(Path::new("chromedriver"), None, Signal::SIGTERM);
    command.arg("--port=0").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut driver = spawn_bound(command).expect("chromedriver starts: run scripts/setup");
    let mut lines = BufReader::new(driver.stdout.take().expect("piped")).lines();
    let told = lines.by_ref().map_while(Result::ok).find(|line| line.contains("started successfully on port"));
    let told = told.expect("chromedriver is not installed, or does not start: run scripts/setup");
    // It is never stopped: it ends with this process.
    std::thread::spawn(move || {
        lines.for_each(drop);
        driver.wait()
    });
    let port = told.trim_end_matches('.').rsplit(' ').next().expect("its port");
    format!("http://127.0.0.1:{port}/")
});

//! A real Chromium, headless, driven over WebDriver by Debian's `chromedriver`: clicks, types, reads what a person would read, and tells what
//! the page logged and where it sent requests.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::http;
use crate::process::{PROCESS_DEADLINE, bound_command, spawn_bound};

/// Between two looks at a page.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The name of an element's id in WebDriver's answers.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// Whether pages may run scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scripts {
    On,
    Off,
}

/// What a page is shown as.
#[derive(Debug, Clone, Copy)]
pub enum Look {
    Light,
    Dark,
    /// As narrow as a phone, and light.
    Phone,
}

/// A browser of its own, with an empty profile; closed when dropped.
pub struct Browser {
    session: String,
}

impl Browser {
    pub async fn start(scripts: Scripts) -> Browser {
        let javascript = if scripts == Scripts::On { 1 } else { 2 };
        let options = json!({
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900",
                     "--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"],
            "prefs": { "profile.managed_default_content_settings.javascript": javascript },
        });
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
        } } });
        let started = call("POST", "/session", &wanted).await;
        let session = format!("/session/{}", started["sessionId"].as_str().expect("a session"));
        let browser = Browser { session };
        browser.show(Look::Light).await;
        browser
    }

    pub async fn go(&self, url: &str) {
        self.post("/url", &json!({ "url": url })).await;
    }

    pub async fn url(&self) -> String {
        text(&self.get("/url").await)
    }

    /// Clicks the first link or button whose text begins so, once it is there.
    pub async fn click(&self, name: &str) {
        let path = format!("//*[self::a or self::button][starts-with(normalize-space(.), \"{name}\")]");
        self.click_at("xpath", &path).await;
    }

    /// Clicks what a CSS selector means, once it is there.
    pub async fn click_on(&self, selector: &str) {
        self.click_at("css selector", selector).await;
    }

    async fn click_at(&self, using: &str, value: &str) {
        let deadline = Instant::now() + PROCESS_DEADLINE;
        loop {
            // A live page may replace what was just found.
            let clicked = async {
                let found = self.try_post("/element", &json!({ "using": using, "value": value })).await?;
                let element = found[ELEMENT].as_str().expect("an element").to_owned();
                self.try_post(&format!("/element/{element}/click"), &json!({})).await
            };
            match clicked.await {
                Ok(_) => return,
                Err(error) if Instant::now() > deadline => {
                    panic!("cannot click {value}: {error}\n{}", self.text().await)
                }
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Types into the field that a CSS selector means.
    pub async fn write(&self, selector: &str, value: &str) {
        let found = self.post("/element", &json!({ "using": "css selector", "value": selector })).await;
        let element = found[ELEMENT].as_str().expect("an element");
        self.post(&format!("/element/{element}/value"), &json!({ "text": value })).await;
    }

    /// Presses a key, wherever the focus is; `\u{e004}` is Tab, `\u{e007}` is Enter.
    pub async fn press(&self, key: char) {
        let actions = json!([{ "type": "keyDown", "value": key }, { "type": "keyUp", "value": key }]);
        let keyboard = json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": actions }] });
        self.post("/actions", &keyboard).await;
    }

    /// What a script, run as WebDriver's and not as the page's, answers.
    pub async fn ask(&self, script: &str) -> Value {
        self.post("/execute/sync", &json!({ "script": script, "args": [] })).await
    }

    /// The text that a person reads.
    pub async fn text(&self) -> String {
        let found = self.post("/element", &json!({ "using": "css selector", "value": "body" })).await;
        let element = found[ELEMENT].as_str().expect("a body").to_owned();
        self.try_get(&format!("/element/{element}/text")).await.map(|value| text(&value)).unwrap_or_default()
    }

    /// Waits until the page says so.
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

    /// What pages have logged since the last call, as warnings or errors.
    pub async fn complaints(&self) -> Vec<String> {
        let entries = self.post("/se/log", &json!({ "type": "browser" })).await;
        let entries = entries.as_array().expect("a log").iter();
        entries
            .filter(|entry| entry["level"] != "INFO" && entry["level"] != "DEBUG")
            .map(|entry| text(&entry["message"]))
            .collect()
    }

    /// URLs that were requested since the last call.
    pub async fn requested(&self) -> Vec<String> {
        let entries = self.post("/se/log", &json!({ "type": "performance" })).await;
        let event = |entry: &Value| -> Option<String> {
            let event: Value = serde_json::from_str(entry["message"].as_str()?).ok()?;
            let is_request = event["message"]["method"] == "Network.requestWillBeSent";
            is_request.then(|| text(&event["message"]["params"]["request"]["url"]))
        };
        entries.as_array().expect("a log").iter().filter_map(event).collect()
    }

    pub async fn show(&self, look: Look) {
        let (width, height, scheme) = match look {
            Look::Light => (1280, 900, "light"),
            Look::Dark => (1280, 900, "dark"),
            Look::Phone => (390, 844, "light"),
        };
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", &media).await;
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": matches!(look, Look::Phone) });
        self.devtools("Emulation.setDeviceMetricsOverride", &size).await;
    }

    /// The whole page as a picture.
    pub async fn picture(&self, path: &Path) {
        let metrics = self.devtools("Page.getLayoutMetrics", &json!({})).await;
        let size = &metrics["cssContentSize"];
        let clip = json!({ "x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1 });
        let wanted = json!({ "format": "png", "captureBeyondViewport": true, "clip": clip });
        let picture = self.devtools("Page.captureScreenshot", &wanted).await;
        let bytes = base64(picture["data"].as_str().expect("a picture"));
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("the folder for pictures");
        std::fs::write(path, bytes).expect("the picture is written");
    }

    async fn devtools(&self, command: &str, parameters: &Value) -> Value {
        self.post("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters })).await
    }

    async fn get(&self, path: &str) -> Value {
        self.try_get(path).await.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        self.try_post(path, body).await.unwrap_or_else(|error| panic!("{path} {body}: {error}"))
    }

    async fn try_get(&self, path: &str) -> Result<Value, String> {
        try_call("GET", &format!("{}{path}", self.session), None).await
    }

    async fn try_post(&self, path: &str, body: &Value) -> Result<Value, String> {
        try_call("POST", &format!("{}{path}", self.session), Some(body)).await
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = http::request_blocking(&DRIVER, "DELETE", &self.session, &[], "");
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

async fn call(method: &str, path: &str, body: &Value) -> Value {
    try_call(method, path, Some(body)).await.unwrap_or_else(|error| panic!("{path}: {error}"))
}

async fn try_call(method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
    let body = body.map_or_else(String::new, Value::to_string);
    let answer = http::request(&DRIVER, method, path, &[("Content-Type", "application/json")], &body).await;
    let mut value: Value = serde_json::from_str(&answer.body).map_err(|error| format!("{error}: {answer:?}"))?;
    let value = value["value"].take();
    if answer.status == 200 { Ok(value) } else { Err(format!("{}: {}", value["error"], value["message"])) }
}

/// The address of the one driver of this test process.
static DRIVER: LazyLock<String> = LazyLock::new(|| {
    let mut command = bound_command(Path::new("chromedriver"), None, Signal::SIGTERM);
    command.arg("--port=0").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut driver = spawn_bound(command).expect("chromedriver starts: run scripts/setup");
    let mut lines = BufReader::new(driver.stdout.take().expect("piped")).lines();
    let told = lines.by_ref().map_while(Result::ok).find(|line| line.contains("started successfully on port"));
    let told = told.expect("chromedriver is not installed, or does not start: run scripts/setup");
    // It is never asked to end: it ends with this process.
    std::thread::spawn(move || {
        lines.for_each(drop);
        driver.wait()
    });
    let port = told.trim_end_matches('.').rsplit(' ').next().expect("its port");
    format!("127.0.0.1:{port}")
});

/// Standard base64, as pictures come.
fn base64(text: &str) -> Vec<u8> {
    let value = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u32> = text.bytes().filter_map(value).map(u32::from).collect();
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let bits = group.iter().fold(0, |bits, digit| bits << 6 | digit) << (6 * (4 - group.len()));
        bytes.extend(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}

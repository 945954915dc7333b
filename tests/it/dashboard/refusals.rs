//! The dashboard refuses requests from other origins, for unknown host names and without a token.

use std::io::{Read, Write};
use std::net::TcpListener;

use super::served::Served;
use crate::cli::program::Program;
use crate::conformance::sqlite::scene::Scene;
use crate::scene::Runs;
use support::browser::{Browser, Scripts};

const TOKEN: &str = "correct horse battery staple";
const PAUSE: &str = "verb=pause&target=handler%3Dstock";

async fn scene() -> Scene {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept_all([]).await.unwrap();
    scene
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_from_another_origin_is_refused_and_one_from_its_own_page_succeeds() {
    let scene = scene().await;
    let served = Served::on(&scene).await;
    let own = format!("http://{}", served.address);
    for foreign in [
        &[][..],
        &[("Origin", "http://evil.example")],
        &[("Origin", "null")],
        &[("Origin", own.as_str()), ("Sec-Fetch-Site", "cross-site")],
        &[("Sec-Fetch-Site", "same-site")],
    ] {
        let refused = served.post("/act", foreign, PAUSE).await;
        assert_eq!(refused.status, 403, "{foreign:?}: {}", refused.body);
    }
    assert_eq!(scene.count("inbox_audit").await, 0);
    // A GET request changes nothing.
    assert_eq!(served.get("/act?verb=pause&handler=stock", &[]).await.status, 200);
    assert_eq!(scene.count("inbox_audit").await, 0);
    let done = served.post("/act", &[("Origin", &own), ("Sec-Fetch-Site", "same-origin")], PAUSE).await;
    assert_eq!((done.status, done.header("location")), (303, Some("/?result=pause-1#handlers")));
    assert_eq!(scene.count("inbox_audit WHERE action = 'pause' AND actor = 'alice'").await, 1);
}

/// Serves a page that sends a form to the dashboard as soon as it is loaded. Returns its URL.
fn evil_page(target: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let fields = "<input name=verb value=pause><input name=target value='handler=stock'>";
    let page = format!(
        "<!doctype html><title>evil</title><form method=post action={target}>{fields}</form><script>document.forms[0].submit()</script>"
    );
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.read(&mut [0; 4096]);
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(format!("{head}{page}").as_bytes());
        }
    });
    format!("http://{address}/")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_origin_in_a_real_browser_changes_nothing() {
    let scene = scene().await;
    let (served, browser) = (Served::on(&scene).await, Browser::start(Scripts::On).await);
    browser.go(&evil_page(&served.url("/act"))).await;
    browser.until("an action must come from a page of this dashboard").await;
    assert_eq!(scene.count("inbox_audit").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_host_name_is_refused_and_every_answer_has_a_strict_content_security_policy() {
    let scene = scene().await;
    let served = Served::with(&scene, &["--listen", "127.0.0.1:0", "--host", "inbox.example.com"], &[]).await;
    assert_eq!(served.get("/", &[("Host", "evil.example")]).await.status, 421);
    assert_eq!(served.get("/live", &[("Host", "evil.example:8088")]).await.status, 421);
    for known in ["localhost:1", "inbox.example.com", "127.0.0.1"] {
        assert_eq!(served.get("/", &[("Host", known)]).await.status, 200, "{known}");
    }
    for path in ["/", "/style.css", "/nowhere", "/act?verb=nothing"] {
        let answer = served.get(path, &[]).await;
        let policy = answer.header("content-security-policy").unwrap_or_default();
        assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{path}: {policy}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
    }
    assert_eq!(served.get("/nowhere", &[]).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_has_access_without_the_configured_token() {
    let scene = scene().await;
    let variables = [("WHARF_DASHBOARD_TOKEN", TOKEN)];
    let served = Served::with(&scene, &["--listen", "127.0.0.1:0"], &variables).await;
    let own = format!("http://{}", served.address);

    let asked = served.get("/poisoned?handler=stock", &[]).await;
    assert_eq!((asked.status, asked.header("location")), (303, Some("/login?next=%2Fpoisoned%3Fhandler%3Dstock")));
    assert_eq!(served.get("/live", &[]).await.status, 401);
    assert_eq!(served.post("/act", &[("Origin", &own)], PAUSE).await.status, 401);
    assert_eq!(served.get("/", &[("Authorization", "Bearer wrong horse battery staple")]).await.status, 303);
    assert_eq!(served.get("/", &[("Authorization", &format!("Bearer {TOKEN}"))]).await.status, 200);
    let wrong = served.post("/login", &[("Origin", &own)], "token=wrong&name=mallory").await;
    assert_eq!((wrong.status, wrong.header("set-cookie")), (401, None));
    let nameless = format!("token={}&name=+", TOKEN.replace(' ', "+"));
    let nameless = served.post("/login", &[("Origin", &own)], &nameless).await;
    assert_eq!((nameless.status, nameless.header("set-cookie")), (400, None));
    assert!(nameless.body.contains("A name is missing"), "{}", nameless.body);

    // A program sends the token without an origin. This is safe, because no other site can send the header.
    let bearer = format!("Bearer {TOKEN}");
    assert_eq!(served.post("/act", &[("Authorization", "Bearer wrong horse battery")], PAUSE).await.status, 403);
    assert_eq!(served.post("/act", &[("Authorization", &bearer)], PAUSE).await.status, 303);
    let resume = "verb=resume&target=handler%3Dstock";
    assert_eq!(served.post("/act", &[("Authorization", &bearer)], resume).await.status, 303);
    assert_eq!(scene.count("inbox_audit WHERE actor = 'token'").await, 2);

    let browser = Browser::start(Scripts::On).await;
    browser.go(&served.url("/kafka")).await;
    browser.write("[name=name]", "carol").await;
    browser.write("[name=token]", TOKEN).await;
    browser.click("Log in").await;
    browser.until("You act as carol").await;
    assert_eq!(browser.url().await, served.url("/kafka"));
    browser.click("Start").await;
    browser.click("Pause…").await;
    browser.click_on("button.primary").await;
    browser.until("Paused").await;
    assert_eq!(scene.count("inbox_audit WHERE actor = 'carol'").await, 1);
    assert_eq!(browser.ask("return document.cookie").await, "", "no script can read the session");
    served.assert_quiet(&browser).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_public_address_requires_a_token_which_cannot_be_given_as_an_argument() {
    let scene = scene().await;
    let wharf = Program::on(&scene);
    let refused = wharf.run(&["dashboard", "--listen", "0.0.0.0:0"]).await;
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.stderr.contains("--token-file"), "{refused:?}");
    assert_eq!(wharf.run(&["dashboard", "--token", TOKEN]).await.code, 2);
    let folder = tempfile::tempdir().unwrap();
    let (short, long) = (folder.path().join("short"), folder.path().join("long"));
    std::fs::write(&short, "hunter2\n").unwrap();
    std::fs::write(&long, format!("{TOKEN}\n")).unwrap();
    let refused = wharf.run(&["dashboard", "--token-file", short.to_str().unwrap()]).await;
    assert!(refused.code == 2 && !refused.stderr.contains("hunter2"), "{refused:?}");

    let arguments = ["--listen", "0.0.0.0:0", "--token-file", long.to_str().unwrap()];
    let served = Served::with(&scene, &arguments, &[]).await;
    let port = served.address.rsplit(':').next().unwrap();
    let answer = support::http::request(&format!("127.0.0.1:{port}"), "GET", "/", &[], "").await;
    assert_eq!(answer.status, 303);
}

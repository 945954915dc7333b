//! Reads previews and sends their forms as a browser would, without a browser.

use crate::scene::within;
use support::http::{Answer, request};

/// The links to actions on a page, as queries, for example `verb=discard&handler=stock`.
pub async fn links(address: &str, page: &str) -> Vec<String> {
    let shown = request(address, "GET", page, &[], "").await;
    assert_eq!(shown.status, 200, "{}", shown.body);
    let links = shown.body.split("/act?").skip(1).filter_map(|rest| rest.split('"').next());
    links.map(|link| link.replace("&#38;", "&").replace("&amp;", "&")).collect()
}

/// Loads the preview of an action. Returns the form as its page would send it.
pub async fn form(address: &str, query: &str) -> String {
    let page = request(address, "GET", &format!("/act?{query}"), &[], "").await;
    assert_eq!(page.status, 200, "{}", page.body);
    let hidden = page.body.split("<input type=\"hidden\" ").skip(1).map(|rest| {
        let value = |name: &str| rest.split(&format!("{name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
        // The target is a query, whose `&` is escaped in HTML.
        let text = value("value").unwrap().replace("&#38;", "&");
        let encoded = text.replace('%', "%25").replace('&', "%26").replace('=', "%3D").replace('+', "%2B");
        format!("{}={encoded}", value("name").unwrap())
    });
    hidden.collect::<Vec<_>>().join("&")
}

/// Posts a form with this `Origin`.
pub async fn post(address: &str, path: &str, origin: &str, form: &str) -> Answer {
    let headers = [("Content-Type", "application/x-www-form-urlencoded"), ("Origin", origin)];
    request(address, "POST", path, &headers, form).await
}

/// Sends the form of an action from the origin of the dashboard.
pub async fn send(address: &str, form: &str) -> Answer {
    let sent = post(address, "/act", &format!("http://{address}"), form).await;
    assert_eq!(sent.status, 303, "{}", sent.body);
    sent
}

/// Waits for the end of the action that the answer redirects to. Returns its result.
pub async fn ended(address: &str, sent: &Answer) -> String {
    let job = sent.header("location").unwrap();
    within(async {
        loop {
            let page = request(address, "GET", job, &[], "").await.body;
            let ends = ["finished: ", "stopped: ", "failed: ", "ended at "];
            if let Some(end) = ends.iter().find_map(|end| page.split_once(*end).map(|(_, rest)| (end, rest))) {
                return format!("{}{}", end.0, end.1.split('<').next().unwrap());
            }
        }
    })
    .await
}

//! The router in a user's service: nested under a path, with rights that the service decides.

use axum::Router;
use tokio::net::TcpListener;
use wharf::dashboard::{Access, Dashboard, Visitor};
use wharf::{Failure, Sqlite};

use crate::conformance::sqlite::scene::Scene;
use crate::scene::{Runs, record};
use support::http::{Answer, request};

/// The rights of the user that the header `X-User` names.
pub fn access() -> Access {
    Access::by(|request| match request.headers.get("x-user").and_then(|name| name.to_str().ok()) {
        Some("guest") => Visitor::named("guest").may_look(),
        Some("support") => Visitor::named("support").may_see_payloads(),
        Some(name) => Visitor::named(name).may_act(),
        None => Visitor::nobody(),
    })
}

/// A service with the dashboard at `/admin/inbox`.
pub async fn service(dashboard: Dashboard<Sqlite>) -> String {
    service_at("/admin/inbox", dashboard).await
}

async fn service_at(mount: &str, dashboard: Dashboard<Sqlite>) -> String {
    let router = Router::new().nest(mount, dashboard.router());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

pub async fn ask(address: &str, method: &str, path: &str, user: &str, form: &str) -> Answer {
    let origin = format!("http://{address}");
    let headers = [("X-User", user), ("Origin", &origin), ("Content-Type", "application/x-www-form-urlencoded")];
    request(address, method, &format!("/admin/inbox{path}"), &headers[usize::from(user.is_empty())..], form).await
}

/// The links of a page.
fn hrefs(page: &Answer) -> Vec<String> {
    let links = page.body.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next());
    links.map(|link| link.replace("&#38;", "&").replace("&amp;", "&")).collect()
}

/// Loads the page that a request was redirected to.
async fn followed(address: &str, redirected: &Answer, headers: &[(&str, &str)]) -> Answer {
    assert_eq!(redirected.status, 303, "{}", redirected.body);
    let location = redirected.header("location").unwrap();
    let page = request(address, "GET", location.split('#').next().unwrap(), headers, "").await;
    assert_eq!(page.status, 200, "{location}");
    page
}

#[tokio::test(flavor = "multi_thread")]
async fn every_link_and_every_redirect_of_a_mounted_dashboard_leads_to_a_page() {
    let scene = Scene::new().await;
    let broken = Runs::new().answering("stock", |_| Err(Failure::poison("no shelf")));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    inbox.accept(record("m1")).await.unwrap();
    inbox.drain().await.unwrap();
    // axum serves the start page as `/admin/inbox` in the first case, and as `/admin/inbox/` in the second.
    for (mount, start) in [("/admin/inbox", "/admin/inbox"), ("/admin/inbox/", "/admin/inbox/")] {
        let address = service_at(mount, Dashboard::new(&scene.store, access())).await;
        let dave = ("X-User", "dave");
        let refused =
            request(&address, "GET", "/admin/inbox/message?message=m1&payload=show", &[("X-User", "guest")], "");
        let mut links = hrefs(&refused.await);
        assert!(links.iter().any(|link| link == start), "{links:?}");
        let mut seen = std::collections::HashSet::new();
        while let Some(link) = links.pop() {
            if link.starts_with('/') && seen.insert(link.clone()) {
                let page = request(&address, "GET", &link, &[dave], "").await;
                assert_eq!(page.status, 200, "{link}");
                let own = link.split('?').next().unwrap();
                links.extend(
                    hrefs(&page).into_iter().map(|to| if to.starts_with('?') { format!("{own}{to}") } else { to }),
                );
            }
        }
        assert!(seen.iter().any(|link| link.contains("/act?verb=replay")), "{seen:?}");

        let origin = format!("http://{address}");
        let form = ("Content-Type", "application/x-www-form-urlencoded");
        for (verb, says) in [("pause", "Paused: "), ("resume", "Resumed: ")] {
            let headers = [dave, ("Origin", &origin), form];
            let done = format!("verb={verb}&target=handler%3Dstock");
            let done = request(&address, "POST", "/admin/inbox/act", &headers, &done).await;
            assert!(followed(&address, &done, &[dave]).await.body.contains(says));
        }

        let token = "b6a1f0c2d3e4958677";
        let address = service_at(mount, Dashboard::new(&scene.store, Access::by_token(token).unwrap())).await;
        let origin = format!("http://{address}");
        let asked = followed(&address, &request(&address, "GET", start, &[], "").await, &[]).await;
        assert!(asked.body.contains("name=\"next\" value=\"/\""), "{}", asked.body);
        let known = format!("next=%2F&token={token}&name=alice");
        let known = request(&address, "POST", "/admin/inbox/login", &[("Origin", &origin), form], &known).await;
        let session = known.header("set-cookie").unwrap().split(';').next().unwrap();
        assert!(followed(&address, &known, &[("Cookie", session)]).await.body.contains("<strong>alice</strong>"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_decides_who_looks_who_sees_payloads_and_who_acts() {
    let scene = Scene::new().await;
    let broken = Runs::new().answering("stock", |_| Err(Failure::poison("no shelf")));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    inbox.accept(record("m1")).await.unwrap();
    inbox.drain().await.unwrap();
    let address = service(Dashboard::new(&scene.store, access())).await;

    assert_eq!(ask(&address, "GET", "", "", "").await.status, 401);
    let page = ask(&address, "GET", "", "guest", "").await;
    assert_eq!(page.status, 200, "{}", page.body);
    // Every link stays below the mount path, and a visitor without the right to act sees no action.
    let is_below = |link: &String| link == "/admin/inbox" || link.starts_with("/admin/inbox/") || link.starts_with('#');
    let links = hrefs(&page);
    assert!(links.iter().all(is_below), "{links:?}");
    assert!(!page.body.contains("Replay…") && page.body.contains("no shelf"), "{}", page.body);

    let story = "/message?message=m1";
    assert_eq!(ask(&address, "GET", &format!("{story}&payload=show"), "guest", "").await.status, 403);
    let shown = ask(&address, "GET", &format!("{story}&payload=show"), "support", "").await;
    assert!(shown.body.contains("payload of m1"), "{}", shown.body);
    let not_asked = ask(&address, "GET", story, "support", "").await;
    assert!(!not_asked.body.contains("payload of m1"), "{}", not_asked.body);

    let replay = "verb=replay&target=message%3Dm1&because=mended";
    for looker in ["guest", "support"] {
        assert_eq!(ask(&address, "POST", "/act", looker, replay).await.status, 403);
        assert_eq!(ask(&address, "GET", "/act?verb=replay&message=m1", looker, "").await.status, 403);
    }
    assert_eq!(scene.count("inbox_audit").await, 0);
    let done = ask(&address, "POST", "/act", "dave", replay).await;
    assert_eq!(done.header("location"), Some("/admin/inbox/message?message=m1&result=replay-1"));
    assert_eq!(scene.count("inbox_audit WHERE actor = 'dave' AND because = 'mended'").await, 1);
}

//! Open tabs recover after a restart, and slow searches of visitors do not use up the connections of the service.

use super::served::Served;
use crate::scene::{Runs, Scene, record, within};
use support::browser::{Browser, Scripts};
use support::postgres::connect;

const TOKEN: &str = "correct horse battery staple";

#[tokio::test(flavor = "multi_thread")]
async fn a_tab_asks_for_the_token_again_after_a_restart_of_the_dashboard() {
    let scene = crate::conformance::sqlite::scene::Scene::new().await;
    let variables = [("WHARF_DASHBOARD_TOKEN", TOKEN)];
    let served = Served::with(&scene, &["--listen", "127.0.0.1:0"], &variables).await;
    let (browser, address) = (Browser::start(Scripts::On).await, served.address.clone());
    browser.go(&served.url("/kafka")).await;
    browser.write("[name=name]", "carol").await;
    browser.write("[name=token]", TOKEN).await;
    browser.click("Log in").await;
    let is_live = "return document.querySelector('[data-live-state].on') !== null";
    within(async { while browser.ask(is_live).await != true {} }).await;

    served.ends().await;
    let _again = Served::with(&scene, &["--listen", &address], &variables).await;
    // The page changes without a click.
    browser.until("Your name, for the audit").await;
    assert!(browser.url().await.ends_with("/login?next=%2Fkafka"));
}

#[tokio::test(flavor = "multi_thread")]
async fn searches_that_hang_hold_at_most_two_connections_and_time_out() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept(record("m1")).await.unwrap();
    inbox.drain().await.unwrap();
    let served = Served::on(&scene).await;
    assert_eq!(served.get("/", &[]).await.status, 200);

    // No search ends while another session has locked the table.
    let other = connect(&scene.database.url()).await;
    other.batch_execute("BEGIN; LOCK TABLE inbox_message IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let search = async |path: &str| served.get(path, &[]).await;
    let (one, two, three, four) = tokio::join!(
        search("/deliveries?error=zzz"),
        search("/poisoned?error=zzz"),
        search("/deliveries?error=yyy"),
        search("/deliveries?error=xxx"),
    );
    for refused in [one, two, three, four] {
        assert_eq!(refused.status, 503, "{}", refused.body);
        assert!(refused.body.contains("the search took too long: narrow it"), "{}", refused.body);
    }
    // The searches that had begun still wait for the lock, and count against the limit of two.
    let waiting = "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
                   AND (query LIKE '%inbox_status s%' OR query LIKE '%inbox_matching%')";
    let waiting = other.query_one(&format!("SELECT count(*) FROM {waiting}"), &[]).await.unwrap().get::<_, i64>(0);
    assert!(waiting <= 2, "{waiting} searches wait");
    other.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(served.get("/deliveries?error=zzz", &[]).await.status, 200);
}

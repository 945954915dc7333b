//! The incident is resolved with the dashboard alone, by clicks in a real browser.

use std::time::Duration;

use super::{Incident, JUNK, MENDABLE};
use crate::dashboard::picture;
use crate::dashboard::served::Served;
use support::browser::{Browser, Look, Scripts};

#[tokio::test(flavor = "multi_thread")]
async fn an_incident_is_found_and_resolved_by_clicks_alone() {
    let incident = Incident::happens().await;
    incident.scene.until("SELECT count(*) FROM inbox_processor WHERE alive_until < now()").await;
    let (served, browser) = (Served::on(&incident.scene).await, Browser::start(Scripts::On).await);

    // Find the problems: the first page shows them.
    browser.go(&served.url("/")).await;
    let shown = browser.until("no column named price_eur").await;
    for word in ["mail is paused", "10,000+ poisoned deliveries of stock", "dead process", "7 records in quarantine"] {
        assert!(shown.contains(word), "{word} is not in\n{shown}");
    }
    browser.until("live").await;
    for (look, name) in [(Look::Light, "start"), (Look::Dark, "start-dark"), (Look::Phone, "start-phone")] {
        browser.show(look).await;
        browser.picture(&picture(name)).await;
    }
    browser.show(Look::Light).await;

    // Roll back; then replay one, then ten, then the rest.
    let running = incident.rolled_back().start().await.unwrap();
    browser.click("Replay…").await;
    browser.until("With a canary").await;
    browser.write("[name=because]", "release 42 was rolled back").await;
    browser.picture(&picture("preview")).await;
    browser.click("Replay 10,000+").await;
    browser.until("Canary replay").await;
    browser.picture(&picture("canary")).await;
    browser.until("replayed, none failed again").await;
    browser.click("Still poisoned").await;
    browser.until("No poisoned delivery matches").await;

    quarantine(&incident, &served, &browser).await;

    browser.go(&served.url("/")).await;
    browser.click("Resume…").await;
    browser.until("Deliveries of this handler are started again").await;
    browser.write("[name=because]", "the incident is over").await;
    browser.click_on("button.primary").await;
    browser.until("its deliveries are claimed again").await;

    // The delivery of the crashed instance runs again without an action.
    incident.is_over().await;
    browser.go(&served.url("/")).await;
    browser.until("No problems.").await;

    // The history of the delivery has both attempts and the actions in between; the audit has every action.
    browser.go(&served.url("/deliveries?message=m000000&handler=stock")).await;
    browser.click("m000000").await;
    let story = browser.until("attempt 2: done").await;
    for word in ["attempt 1: permanent", "no column named price_eur", "alice: release 42 was rolled back"] {
        assert!(story.contains(word), "{word} is not in\n{story}");
    }
    browser.picture(&picture("story")).await;
    browser.click("Audit").await;
    let audit = browser.until("the incident is over").await;
    assert!(audit.contains("junk of a test producer") && audit.contains("too many mails"), "{audit}");
    browser.picture(&picture("audit")).await;
    served.assert_quiet(&browser).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

/// Records that the new build accepts leave the quarantine; the rest is discarded.
async fn quarantine(incident: &Incident, served: &Served, browser: &Browser) {
    browser.click("Quarantine").await;
    browser.until("missing identity").await;
    browser.picture(&picture("quarantine")).await;
    browser.click("Replay all that match…").await;
    browser.until("accepts the records again").await;
    browser.write("[name=because]", "the id is in a header").await;
    browser.click(&format!("Replay {}", MENDABLE + JUNK)).await;
    // The second step has them all, and the junk is more than a tenth of it.
    browser.until("too many records of a step were rejected again").await;
    let tried = format!(
        "SELECT (count(*) = {JUNK} AND count(*) FILTER (WHERE replays = 1) = {JUNK})::int::bigint FROM inbox_quarantine"
    );
    incident.scene.until(&tried).await;
    browser.go(&served.url("/quarantine?topic=orders")).await;
    browser.click("Delete all that match…").await;
    browser.until("This cannot be undone").await;
    browser.write("[name=because]", "junk of a test producer").await;
    browser.click(&format!("Delete {JUNK}")).await;
    browser.until(&format!("finished: {JUNK} deleted")).await;
    browser.click("Quarantine").await;
    browser.until("There are no quarantined records").await;
}

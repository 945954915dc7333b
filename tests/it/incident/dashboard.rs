//! With the dashboard alone, by clicks in a real browser.

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

    // What is wrong? The first page says it.
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

    // Roll back; then one, then ten, then the rest.
    let running = incident.rolled_back().start().await.unwrap();
    browser.click("Replay…").await;
    browser.until("With a canary").await;
    browser.write("[name=because]", "release 42 was rolled back").await;
    browser.picture(&picture("preview")).await;
    browser.click("Replay 10,000+").await;
    browser.until("Canary replay").await;
    browser.picture(&picture("canary")).await;
    browser.until("ended: nothing that matches is left").await;
    browser.click("What is still poisoned").await;
    browser.until("Nothing that is poisoned matches").await;

    quarantine(&incident, &served, &browser).await;

    browser.go(&served.url("/")).await;
    browser.click("Resume…").await;
    browser.until("Deliveries of this handler are started again").await;
    browser.write("[name=because]", "the incident is over").await;
    browser.click_on("button.primary").await;
    browser.until("its deliveries are claimed again").await;

    // The dead instance's delivery is run again by itself.
    incident.is_over().await;
    browser.go(&served.url("/")).await;
    browser.until("All is well.").await;

    // The story has both attempts and who acted in between; the audit has every act.
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

/// What the new build can accept leaves the quarantine, the rest is thrown away.
async fn quarantine(incident: &Incident, served: &Served, browser: &Browser) {
    browser.click("Quarantine").await;
    browser.until("missing identity").await;
    browser.picture(&picture("quarantine")).await;
    browser.click("Accept all that match anew…").await;
    browser.until("accepts them anew").await;
    browser.write("[name=because]", "the id is in a header").await;
    browser.click(&format!("Accept anew {}", MENDABLE + JUNK)).await;
    browser.until(&format!("Asked for {}", MENDABLE + JUNK)).await;
    let tried = format!(
        "SELECT (count(*) = {JUNK} AND count(*) FILTER (WHERE replays = 1) = {JUNK})::int::bigint FROM inbox_quarantine"
    );
    incident.scene.until(&tried).await;
    browser.go(&served.url("/quarantine?topic=orders")).await;
    browser.click("Delete all that match…").await;
    browser.until("What they held is gone").await;
    browser.write("[name=because]", "junk of a test producer").await;
    browser.click(&format!("Delete for good {JUNK}")).await;
    browser.until("Nothing is in quarantine").await;
}

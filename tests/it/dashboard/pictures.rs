//! Makes the screenshots of the documentation: the dashboard of a shop with an incident.
//!
//! A plot covers at least five minutes and shows measured values, so the test takes five minutes and runs only in
//! scripts/nightly. CONTRIBUTING.md has the command that replaces `docs/images`.

use std::convert::Infallible;
use std::f64::consts::TAU;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use wharf::dashboard::{Access, Dashboard};
use wharf::flow::RateLimit;
use wharf::{Failure, Inbox, Message, Record, RetryPolicy, handler};

use super::picture;
use crate::scene::{Db, Scene, key, within};
use support::browser::{Browser, Look, Scripts};

/// Almost the shortest time that a plot covers, so that its line begins at the left edge.
const OPEN_FOR: Duration = Duration::from_secs(290);
/// The search cluster is down for maintenance in the last minute.
const PAUSED_AFTER: Duration = Duration::from_secs(225);
/// How often orders arrive.
const TICK: Duration = Duration::from_millis(250);
/// The interval at which processes report their rates, with the lease of the tests.
const SAMPLE_EVERY: Duration = Duration::from_secs(2);
/// One of this many orders is from a customer that the fraud service does not know.
const MALLORY_EVERY: u64 = 900;
/// Orders whose customers no longer have a mailbox.
const WITHOUT_MAILBOX: [u64; 3] = [1_111, 2_222, 3_333];

/// The file of a screenshot: `WHARF_PICTURES=docs/images` replaces those of the documentation. A person checks them
/// before they are committed.
fn published(name: &str) -> PathBuf {
    match std::env::var_os("WHARF_PICTURES") {
        Some(folder) => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(folder).join(format!("{name}.png")),
        None => picture(&format!("published-{name}")),
    }
}

#[derive(Serialize, Deserialize)]
struct Order {
    number: u64,
    customer: String,
    total: String,
}

#[derive(Serialize, Deserialize)]
struct Product {
    article: u64,
}

impl Order {
    fn new(number: u64) -> Self {
        let customers = ["alice", "bob", "carol", "dave", "erin", "frank", "grace"];
        let is_mallory = number.is_multiple_of(MALLORY_EVERY);
        let customer = if is_mallory { "mallory" } else { customers[number as usize % customers.len()] };
        Self { number, customer: customer.to_owned(), total: format!("{}.90 EUR", number * 7 % 180 + 9) }
    }

    fn record(&self) -> Record {
        Record::new("orders")
            .with_id(format!("order-{}", self.number))
            .with_source("/shop/orders")
            .with_key(self.customer.clone())
            .with_header("ce_type", "order.placed")
            .with_header("content-type", "application/json")
            .with_position((self.customer.len() % 6) as i32, (self.number / 6) as i64)
            .with_recorded_at(SystemTime::now())
            .json(self)
    }
}

impl Product {
    fn record(&self) -> Record {
        Record::new("products")
            .with_id(format!("product-{}", self.article))
            .with_recorded_at(SystemTime::now())
            .json(self)
    }
}

/// Stands for a call of another service.
async fn takes(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// The mail server is too busy for some orders, and for many while it is overloaded. The second attempt succeeds.
fn is_mail_busy(number: u64) -> bool {
    let is_overloaded = (900..1_500).contains(&number);
    number.is_multiple_of(if is_overloaded { 5 } else { 30 })
}

async fn send_receipt(order: Message<Order>) -> Result<(), Failure> {
    takes(150).await;
    let number = order.payload.number;
    if WITHOUT_MAILBOX.contains(&number) {
        Err(Failure::poison("550 5.1.1 no such mailbox"))
    } else if is_mail_busy(number) && order.attempt() == 1 {
        Err(Failure::retry("421 4.3.2 the mail server is busy, try again later"))
    } else {
        Ok(())
    }
}

async fn reserve_stock(order: Message<Order>) -> Result<(), Failure> {
    takes(5 + order.payload.number % 10).await;
    Ok(())
}

async fn print_invoice(_: Message<Order>) -> Result<(), Failure> {
    takes(30).await;
    Ok(())
}

async fn index_product(_: Message<Product>) -> Result<(), Failure> {
    takes(10).await;
    Ok(())
}

/// The shop's handlers. The fraud check fails for one customer until the fraud service knows her.
fn shop(scene: &Scene, knows_mallory: &Arc<AtomicBool>) -> Inbox<Db> {
    let soon = || RetryPolicy::exponential().max_retries(3).max_delay(Duration::from_secs(8));
    let knows_mallory = Arc::clone(knows_mallory);
    let check_fraud = move |order: Message<Order>| {
        let is_known = order.payload.customer != "mallory" || knows_mallory.load(Ordering::SeqCst);
        async move {
            takes(15).await;
            if is_known { Ok(()) } else { Err(Failure::retry("the fraud service does not know customer mallory")) }
        }
    };
    scene
        .inbox()
        .subscribe("orders", handler(key("stock.reserve"), reserve_stock))
        .subscribe("orders", handler(key("fraud.check"), check_fraud).retry(soon()))
        .subscribe("orders", handler(key("invoice.print"), print_invoice).rate(RateLimit::per_second(32)))
        .subscribe("orders", handler(key("mail.receipt"), send_receipt).retry(soon()))
        .subscribe("products", handler(key("search.index"), index_product))
        .build()
        .unwrap()
}

/// How many orders a second arrive: a tide, smaller waves on it, and a sale.
fn orders_per_sec(elapsed: Duration) -> f64 {
    let secs = elapsed.as_secs_f64();
    let tide = 18.0 + 6.0 * (secs * TAU / 210.0).sin() + 3.0 * (secs * TAU / 37.0).sin();
    let sale = 34.0 * (-((secs - 120.0) / 14.0).powi(2)).exp();
    tide + sale
}

/// Orders and products arrive; after a while somebody pauses the search index.
async fn open_shop(scene: &Scene, inbox: &Inbox<Db>) -> Infallible {
    let (opened, mut tick, mut due, mut number) = (Instant::now(), tokio::time::interval(TICK), 0.0, 1_u64);
    let mut is_paused = false;
    loop {
        tick.tick().await;
        due += orders_per_sec(opened.elapsed()) * TICK.as_secs_f64();
        let arrived = number..number + due as u64;
        (due, number) = (due.fract(), arrived.end);
        let orders = arrived.clone().map(|number| Order::new(number).record());
        let products = arrived.filter(|number| number.is_multiple_of(3)).map(|article| Product { article }.record());
        inbox.accept_all(orders.chain(products)).await.unwrap();
        if opened.elapsed() > PAUSED_AFTER && !is_paused {
            let bob = scene.store.operate().acting_as("bob").because("the search cluster is being upgraded");
            is_paused = bob.pause("search.index").await.unwrap();
        }
    }
}

/// The start page. Often all open deliveries of a handler wait for a retry; the screenshot waits until none is in that
/// state.
async fn start_page(browser: &Browser) {
    let shown = browser.until("search.index is paused").await;
    for word in ["the fraud service does not know customer mallory", "550 5.1.1 no such mailbox", "at most 32/s"] {
        assert!(shown.contains(word), "{word} is not in\n{shown}");
    }
    for (look, name) in [(Look::Dark, "start-dark"), (Look::Light, "start")] {
        browser.show(look).await;
        within(async { while browser.text().await.contains("backoff") {} }).await;
        browser.picture(&published(name)).await;
    }
}

/// The list of poisoned deliveries; and, after the fraud service is repaired and the first one is replayed, its page.
async fn poisoned_pages(browser: &Browser, url: &str, knows_mallory: &AtomicBool) {
    browser.go(&format!("{url}/poisoned?handler=fraud.check")).await;
    browser.until("By error").await;
    browser.picture(&published("poisoned")).await;

    knows_mallory.store(true, Ordering::SeqCst);
    browser.click("order-900").await;
    browser.until("attempt 4: ").await;
    browser.click("Replay…").await;
    browser.write("[name=because]", "the fraud service knows mallory now").await;
    browser.click_on("button.primary").await;
    browser.until("attempt 5: done").await;
    browser.go(&format!("{url}/message?message=order-900")).await;
    browser.until("alice: the fraud service knows mallory now").await;
    browser.picture(&published("story")).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "five minutes: scripts/nightly"]
async fn the_screenshots_of_the_documentation_are_made() {
    let (scene, knows_mallory) = (Scene::new().await, Arc::default());
    let inbox = shop(&scene, &knows_mallory);
    inbox.accept_or_quarantine([Record::new("orders").with_key("order-0").with_payload("{\"number\":")]).await.unwrap();
    let running = inbox.start().await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let dashboard = Dashboard::new(&scene.store, Access::on_this_machine()).acting_as("alice");
    let served = tokio::spawn(dashboard.sample_every(SAMPLE_EVERY).serve(listener));
    let browser = Browser::start(Scripts::On).await;
    browser.go(&url).await;

    let pictures = async {
        tokio::time::sleep(OPEN_FOR).await;
        start_page(&browser).await;
        poisoned_pages(&browser, &url, &knows_mallory).await;
    };
    tokio::select! {
        never = open_shop(&scene, &inbox) => match never {},
        () = pictures => {}
    }
    assert_eq!(browser.complaints().await, [""; 0]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    served.abort();
}

//! The command line shows payloads in their decoded form.

use std::path::Path;

use serde_json::{Value, json};
use support::registry::TestRegistry;
use support::tls::Certificates;
use wharf::formats::Avro;
use wharf::{Failure, Message, Record, handler};

use super::{client, fixture, started};
use crate::cli::program::{Program, finish};
use crate::scene::{Scene, key};

#[tokio::test(flavor = "multi_thread")]
async fn show_decodes_payload_and_key_with_a_registry_whose_secret_is_not_in_the_arguments() {
    let (scene, registry) = (Scene::new().await, started());
    let failing = handler(key("mail"), async |_: Message<Value>| Err::<(), _>(Failure::poison("no")));
    let failing = failing.decoded_by(Avro::<Value>::new(&client(&registry)));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    let with_key = fixture("avro").with_key(fixture("avro_key").payload().unwrap().to_vec());
    inbox.accept_all([with_key, fixture("protobuf")]).await.unwrap();
    inbox.drain().await.unwrap();
    registry.demand("Bearer hunter2");
    let program = Program::on(&scene);
    let show = |message: &str, token: &str, extra: &[&str]| {
        let mut command = program.command();
        command.args(["poisoned", "show", message, "--show-payload", "--registry", &registry.url()]).args(extra);
        command.env("WHARF_REGISTRY_TOKEN", token);
        finish(command)
    };
    let shown = show("avro", "hunter2", &[]).await.stdout;
    assert!(shown.contains("decoded payload:") && shown.contains("\"customer\": \"Ännchen\""), "{shown}");
    assert!(shown.contains("decoded key:\n17"), "{shown}");
    let told: Value = serde_json::from_str(&show("protobuf", "hunter2", &["--json"]).await.stdout).unwrap();
    let decoded = json!({ "key": null, "payload": { "value": { "number": 17, "customer": "Di" } } });
    assert_eq!(told["decoded"], decoded);
    let refused = show("avro", "hunter3", &[]).await;
    assert!(refused.stdout.contains("the payload cannot be decoded: ") && refused.stdout.contains("answers 401"));
    assert!(!refused.stdout.contains("hunter3") && !refused.stderr.contains("hunter3"), "{}", refused.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn show_decodes_a_cloud_event_and_its_data() {
    let (scene, registry) = (Scene::new().await, started());
    let inbox = scene.inbox().subscribe("orders", crate::scene::Runs::new().handler("mail")).build().unwrap();
    let data = fixture("avro").payload().unwrap().to_vec();
    let field = |number: u8, bytes: &[u8]| [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat();
    let event = [field(1, b"17"), field(2, b"/shop"), field(4, b"placed"), field(6, &data)].concat();
    let record =
        Record::new("orders").with_header("content-type", "application/cloudevents+protobuf").with_payload(event);
    inbox.accept(record).await.unwrap();
    let program = Program::on(&scene);
    let mut command = program.command();
    command.args(["deliveries", "show", "17", "--show-payload", "--json", "--registry", &registry.url()]);
    let told: Value = serde_json::from_str(&finish(command).await.stdout).unwrap();
    let decoded = &told["decoded"]["payload"]["value"];
    assert_eq!((&decoded["type"], &decoded["data"]["customer"]), (&json!("placed"), &json!("Ännchen")), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn show_decodes_a_cloud_event_without_a_registry() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", crate::scene::Runs::new().handler("mail")).build().unwrap();
    let of =
        |format: &str| Record::new("orders").with_header("content-type", format!("application/cloudevents+{format}"));
    let json = json!({ "id": "1", "source": "/shop", "type": "placed", "data": { "number": 17 } });
    let avro = b"\x06\x04id\x06\x022\x0csource\x06\x0a/shop\x08type\x06\x0cplaced\x00\x00\x1c{\"number\": 17}";
    // Its data has a frame with a schema id, which cannot be decoded without a registry.
    let protobuf = b"\x0a\x013\x12\x05/shop\x22\x06placed\x32\x06\0\0\0\0\x07x";
    let records =
        [of("json").json(&json), of("avro").with_payload(&avro[..]), of("protobuf").with_payload(&protobuf[..])];
    inbox.accept_all(records).await.unwrap();
    let program = Program::on(&scene);
    for id in ["1", "2"] {
        let told = program.json(&["deliveries", "show", id, "--show-payload"], 0).await;
        let decoded = &told["decoded"]["payload"]["value"];
        assert_eq!((&decoded["type"], &decoded["data"]), (&json!("placed"), &json!({ "number": 17 })), "{told}");
        let hidden = program.json(&["deliveries", "show", id], 0).await;
        assert_eq!(hidden["decoded"], Value::Null, "{hidden}");
    }
    let shown = program.well(&["deliveries", "show", "3", "--show-payload"]).await;
    assert!(shown.contains("decoded payload:") && shown.contains("\"source\": \"/shop\""), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_password_comes_from_a_file_and_the_certificate_of_the_registry_is_verified() {
    let (scene, certificates) = (Scene::new().await, Certificates::generate());
    let schemas = super::FIXTURES["schemas"].as_array().unwrap().clone();
    let registry = TestRegistry::start_with_tls(schemas, &certificates.server);
    registry.demand("Basic c2hvcDpodW50ZXIy");
    let inbox = scene.inbox().subscribe("orders", crate::scene::Runs::new().handler("mail")).build().unwrap();
    inbox.accept(fixture("avro")).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "hunter2\n").unwrap();
    let program = Program::on(&scene);
    let show = |authority: &Path| {
        let mut command = program.command();
        command.args(["deliveries", "show", "avro", "--show-payload", "--registry", &registry.url()]);
        command.args(["--registry-user", "shop", "--registry-secret-file"]).arg(&secret);
        command.arg("--registry-ca").arg(authority);
        finish(command)
    };
    let shown = show(&certificates.authority_path).await.stdout;
    assert!(shown.contains("\"customer\": \"Ännchen\""), "{shown}");
    let refused = show(&certificates.other_authority_path).await.stdout;
    assert!(refused.contains("the payload cannot be decoded: ") && !refused.contains("hunter2"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_with_a_password_in_its_address_is_refused_without_showing_it() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", crate::scene::Runs::new().handler("mail")).build().unwrap();
    inbox.accept(fixture("avro")).await.unwrap();
    let program = Program::on(&scene);
    let mut command = program.command();
    command.args(["deliveries", "show", "avro", "--show-payload", "--registry", "http://shop:hunter2@127.0.0.1:1"]);
    let refused = finish(command).await;
    assert!(refused.stderr.contains("must not contain a password"), "{}", refused.stderr);
    assert!(!refused.stderr.contains("hunter2"), "{}", refused.stderr);
}

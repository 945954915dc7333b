//! Finds the Kafka to test against, and creates the data folder that every broker starts from.
//!
//! Formatting takes a second, mostly to start Java, so it runs once per test process: its result is copied for each
//! broker. The SCRAM user is created here, because a broker with a SCRAM listener needs one at its first start.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use nix::sys::signal::Signal;
use rand::distr::{Alphanumeric, SampleString};

use crate::cache;
use crate::folder::ServiceFolder;
use crate::kafka::{SCRAM_PASSWORD, SCRAM_USER};
use crate::process::{run_to_end, service_server, service_tool};

/// A folder with Kafka's `libs`, to test another version than the one that the set-up script fetches.
const FOLDER_VARIABLE: &str = "WHARF_TEST_KAFKA";

/// The file with the version that the set-up script fetches.
const ENVIRONMENT: &str = include_str!("../../../scripts/environment.sh");

/// The node id of a single broker, written to the data folder.
pub(crate) const NODE_ID: u16 = 1;

/// A broker is small and short-lived: the optimizing compiler and a parallel collector would cost more than they gain.
const JVM_OPTIONS: [&str; 6] = [
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    // A killed broker would leave this file in the system's temporary folder.
    "-XX:-UsePerfData",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
];

/// A broker for [`crate::process::spawn_bound`], which lives in `folder` and reads its settings from a file there.
pub(crate) fn broker_command(folder: &Path, settings: &Path) -> Command {
    // SIGKILL: its data is not needed after our process has ended.
    let mut command = service_server(java(), folder, Signal::SIGKILL);
    add_java_arguments(&mut command, folder);
    command.arg("kafka.Kafka").arg(settings);
    command
}

/// The cluster id of this process's brokers, so that no broker of another process is mistaken for ours.
pub(crate) fn cluster_id() -> &'static str {
    static ID: LazyLock<String> = LazyLock::new(random_id);
    &ID
}

/// Kafka expects 16 bytes in base64: 22 characters, of which the last holds only two bits.
pub(crate) fn random_id() -> String {
    Alphanumeric.sample_string(&mut rand::rng(), 21) + "A"
}

/// Changes a copy of the formatted data folder to that of another cluster.
pub(crate) fn set_cluster_id(data: &Path, cluster_id: &str) {
    rewrite(data, |name| (name == "cluster.id").then(|| cluster_id.to_owned()));
}

/// Changes a copy of the formatted data folder to that of another node of the cluster.
pub(crate) fn mark_data_folder(data: &Path, node_id: u16) {
    rewrite(data, |name| match name {
        "node.id" => Some(node_id.to_string()),
        "directory.id" => Some(random_id()),
        _ => None,
    });
}

/// Changes the values of lines of `meta.properties`.
fn rewrite(data: &Path, value: impl Fn(&str) -> Option<String>) {
    let path = data.join("meta.properties");
    let content = std::fs::read_to_string(&path).expect("a formatted data folder");
    let line = |line: &str| match line.split_once('=').and_then(|(name, _)| Some((name, value(name)?))) {
        Some((name, value)) => format!("{name}={value}\n"),
        None => format!("{line}\n"),
    };
    std::fs::write(&path, content.lines().map(line).collect::<String>()).expect("our own folder");
}

/// Fills `target` with a formatted, never used data folder.
pub(crate) fn make_data_folder(target: &Path, within: &Path) {
    static TEMPLATE: LazyLock<ServiceFolder> = LazyLock::new(format_data_folder);
    let mut copy = service_tool(Path::new("cp"), within);
    copy.args(["-a", "--reflink=auto"]).arg(TEMPLATE.path().join("data")).arg(target);
    run_to_end(copy);
}

fn format_data_folder() -> ServiceFolder {
    let folder = ServiceFolder::create("kafka-format");
    // The ports in these settings are not stored in the data.
    let settings = format!(
        "process.roles=broker,controller\n\
         node.id={NODE_ID}\n\
         controller.quorum.voters={NODE_ID}@127.0.0.1:1\n\
         listeners=PLAINTEXT://127.0.0.1:2,CONTROLLER://127.0.0.1:1\n\
         controller.listener.names=CONTROLLER\n\
         listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\n\
         log.dirs={}\n",
        folder.path().join("data").display(),
    );
    let settings = folder.write("format.properties", &settings);
    let mut format = service_tool(java(), folder.path());
    add_java_arguments(&mut format, folder.path());
    format
        .args(["kafka.tools.StorageTool", "format", "--cluster-id", cluster_id(), "--config"])
        .arg(settings)
        .args(["--add-scram", &format!("SCRAM-SHA-256=[name={SCRAM_USER},password={SCRAM_PASSWORD}]")]);
    run_to_end(format);
    folder
}

fn add_java_arguments(command: &mut Command, folder: &Path) {
    let mut temporary = std::ffi::OsString::from("-Djava.io.tmpdir=");
    temporary.push(folder);
    command.args(JVM_OPTIONS).arg(temporary).arg("-cp").arg(libraries().join("*"));
}

/// The folder of Kafka's jars. Panics with instructions if there is none.
fn libraries() -> &'static Path {
    static LIBRARIES: LazyLock<PathBuf> = LazyLock::new(|| {
        let named = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from);
        let folder = named.unwrap_or_else(|| cache::folder().join(format!("kafka-{}", version())));
        let libraries = folder.join("libs");
        assert!(
            libraries.is_dir(),
            "no Kafka in {}. Run scripts/setup, or set {FOLDER_VARIABLE} to the folder that holds Kafka's `libs`, or \
             KAFKA_BROKERS to the address of a running broker",
            folder.display(),
        );
        libraries
    });
    &LIBRARIES
}

fn version() -> &'static str {
    ENVIRONMENT.lines().find_map(|line| line.strip_prefix("kafka_version=")).expect("the script names a version")
}

fn java() -> &'static Path {
    static JAVA: LazyLock<PathBuf> = LazyLock::new(|| {
        let home = std::env::var_os("JAVA_HOME").map(|home| PathBuf::from(home).join("bin/java"));
        let java = home.filter(|java| java.is_file()).unwrap_or_else(|| PathBuf::from("java"));
        let answer = Command::new(&java).args(["-XX:-UsePerfData", "-version"]).output();
        assert!(
            answer.is_ok_and(|output| output.status.success()),
            "no Java to run Kafka with. Run scripts/setup, or set JAVA_HOME to a Java 17 or newer",
        );
        java
    });
    &JAVA
}

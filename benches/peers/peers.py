"""The queues that are measured: the command of each, and the SQL that counts its jobs that are not completed."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Outside of `benches`, whose files are checked by tests.
BUILT = ROOT / "target" / "peers"


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    version: str
    command: list[str]
    # SQL for the number of jobs that are not durably completed; `{jobs}` is replaced by the number of all jobs.
    open: str
    # What happens to the row of a completed job.
    completed: str
    # A description of the default settings.
    defaults: str
    environment: dict[str, str] = field(default_factory=dict)


# The same sum as awa's own exact count: awa records completions in batches, and adds them up later.
AWA_OPEN = """SELECT {jobs}
    - coalesce((SELECT sum(live_terminal_count) FROM awa.queue_terminal_live_counts), 0)
    - coalesce((SELECT sum(terminal_delta) FROM awa.queue_terminal_count_deltas), 0)
    - coalesce((SELECT sum(completed_count) FROM awa.receipt_completion_batches), 0)
    - coalesce((SELECT sum(pruned_completed_count) FROM awa.queue_terminal_rollups), 0)
    + (SELECT count(*) FROM awa.receipt_completion_tombstones)""".replace("\n", "")


def crate(name: str) -> str:
    lock = (HERE / "rust" / "Cargo.lock").read_text()
    return re.search(rf'name = "{name}"\nversion = "([^"]+)"', lock)[1]


def go_module(name: str) -> str:
    return re.search(rf"{name} v(\S+)", (HERE / "go" / "river" / "go.mod").read_text())[1]


def npm_package(name: str) -> str:
    return json.loads((HERE / "node" / "package-lock.json").read_text())["packages"][f"node_modules/{name}"]["version"]


def rust(package: str) -> list[str]:
    return [str(BUILT / "release" / package)]


def node(folder: str) -> list[str]:
    programs = sorted((BUILT / "node" / "node_modules").glob("node-linux-*/bin/node"))
    program = str(programs[0]) if programs else "node"
    return [program, str(BUILT / "node" / folder / "main.mjs")]


def all_peers() -> list[Peer]:
    return [
        Peer(
            "bare_sql_delete", "bare SQL, deletes", "", rust("peer-bare-sql"), "SELECT count(*) FROM job",
            "deleted", "1 connection, 1 job in a statement", {"PEER_COMPLETES": "delete"},
        ),
        Peer(
            "bare_sql_update", "bare SQL, keeps", "", rust("peer-bare-sql"), "SELECT count(*) FROM job WHERE finished_at IS NULL",
            "kept", "1 connection, 1 job in a statement", {"PEER_COMPLETES": "update"},
        ),
        Peer(
            "wharf", "Wharf", crate("wharf"), rust("peer-wharf"), "SELECT count(*) FROM inbox_delivery WHERE finished_at IS NULL",
            "kept", "concurrency 16",
        ),
        Peer(
            "river", "River (Go)", go_module("github.com/riverqueue/river"), [str(BUILT / "river")],
            "SELECT count(*) FROM river_job WHERE state <> 'completed'",
            "kept", "MaxWorkers 100 (of its README), FetchCooldown 100 ms, FetchPollInterval 1 s",
        ),
        Peer(
            "graphile_worker_rust", "graphile_worker (Rust)", crate("graphile_worker"), rust("peer-graphile-worker"),
            "SELECT count(*) FROM graphile_worker._private_jobs",
            "deleted", "concurrency = number of cores, no local queue, no batches",
        ),
        Peer(
            "graphile_worker_node", "graphile-worker (Node.js)", npm_package("graphile-worker"), node("graphile-worker"),
            "SELECT count(*) FROM graphile_worker._private_jobs",
            "deleted", "concurrentJobs 1, no local queue, no batches",
        ),
        Peer(
            "apalis", "apalis-postgres (Rust)", crate("apalis-postgres"), rust("peer-apalis"),
            "SELECT count(*) FROM apalis.jobs WHERE status <> 'Done'",
            "kept", "batch_size 10, lock_tasks, no concurrency",
        ),
        Peer(
            "awa", "awa (Rust)", crate("awa"), rust("peer-awa"), AWA_OPEN,
            "kept until a partition is full", "max_workers 50, claim_batch_size 512, poll_interval 200 ms",
        ),
        Peer(
            "pg_boss", "pg-boss (Node.js)", npm_package("pg-boss"), node("pg-boss"),
            "SELECT count(*) FROM pgboss.job WHERE state <> 'completed'",
            "kept", "batchSize 1, pollingIntervalSeconds 2",
        ),
        Peer(
            "pgmq", "PGMQ (crate)", crate("pgmq"), rust("peer-pgmq"), "SELECT count(*) FROM pgmq.q_peer",
            "deleted", "1 connection, 1 message in a call",
        ),
    ]

"""A PostgreSQL with durable writes on a disk, on a free port of 127.0.0.1, and the measured processor times."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

SUPERUSER = "postgres"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "1GB",
    # The size of the WAL triggers no checkpoint while something is measured.
    "max_wal_size": "8GB",
}
START_SECONDS = 30
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A server that `with` starts, and that is stopped and removed at the end of the block."""

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="wharf-peers-"))
        self.programs = programs()
        kind = output("stat", "--file-system", "--format=%T", str(self.folder))
        if kind in ("tmpfs", "ramfs"):
            raise SystemExit(f"{self.folder} is in memory; set TMPDIR to a folder on a disk")
        if os.getuid() == 0:
            # PostgreSQL refuses to run as root.
            account = pwd.getpwnam(SUPERUSER)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        self.filesystem = kind
        data = self.folder / "data"
        self.run("initdb", "--auth=trust", "--encoding=UTF8", "--locale=C", "--username", SUPERUSER, "--pgdata", str(data))
        self.port = free_port()
        settings = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        log = open(self.folder / "log", "wb")
        self.process = subprocess.Popen(
            [*unprivileged(), str(self.programs / "postgres"), "-D", str(data), *options], stdout=log, stderr=log, cwd="/")
        deadline = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"PostgreSQL did not start:\n{(self.folder / 'log').read_text()}")
            time.sleep(0.05)
        self.postmaster = int((data / "postmaster.pid").read_text().split()[0])
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder)

    def run(self, program: str, *arguments: str) -> str:
        return output(*unprivileged(), str(self.programs / program), *arguments)

    def is_ready(self) -> bool:
        ready = [str(self.programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False).returncode == 0

    def url(self, database: str) -> str:
        # The server asks for no password, but some clients do not parse a URL without one.
        return f"postgres://{SUPERUSER}:any@127.0.0.1:{self.port}/{database}"

    def execute(self, database: str, *statements: str) -> str:
        # Each statement is a separate `-c`, because VACUUM cannot run in a transaction.
        commands = [part for statement in statements for part in ("-c", statement)]
        psql = [str(self.programs / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", self.url(database)]
        return output(*psql, *commands)

    def cpu_seconds(self) -> float:
        """Processor time of the server, including backends that have ended."""
        children = Path(f"/proc/{self.postmaster}/task/{self.postmaster}/children").read_text().split()
        return cpu_seconds(self.postmaster, 4) + sum(cpu_seconds(int(pid), 2) for pid in children)


class Session:
    """A connection that stays open, so that a query needs no new one."""

    def __init__(self, server: Server, database: str):
        psql = [str(server.programs / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", server.url(database)]
        self.process = subprocess.Popen(psql, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, statement: str) -> str:
        print(f"{statement};", file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"no answer to {statement}")
        return answer.strip()

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def programs() -> Path:
    """The folder that `WHARF_TEST_PG_BIN` names, otherwise that of the newest PostgreSQL of Debian."""
    if folder := os.environ.get("WHARF_TEST_PG_BIN"):
        return Path(folder)
    folders = [folder for folder in Path("/usr/lib/postgresql").glob("*/bin") if (folder / "postgres").exists()]
    if not folders:
        raise SystemExit("no PostgreSQL found; run scripts/setup, or set WHARF_TEST_PG_BIN to the folder with `initdb` and `postgres`")
    return max(folders, key=lambda folder: int(folder.parent.name))


def unprivileged() -> list[str]:
    return ["setpriv", f"--reuid={SUPERUSER}", f"--regid={SUPERUSER}", "--init-groups"] if os.getuid() == 0 else []


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def cpu_seconds(pid: int, fields: int = 2) -> float:
    """The sum of the first fields of utime, stime, cutime, cstime; 0 for a process that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0.0
    # The name in brackets may contain spaces; utime is the twelfth field after it.
    return sum(int(field) for field in stat.rsplit(")", 1)[1].split()[11:11 + fields]) / TICKS


def machine_cpu_seconds() -> float:
    """Processor time of all processes on this machine: everything but idle time and waiting for the disk."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _wait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / TICKS

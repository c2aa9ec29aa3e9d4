"""Sessions that move between hosts: what travels, what goes on, and what is reported before
anything is touched.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts_lab.host import Host
from hosts_lab.relay import Relay
from servers.postgresql import PostgresServer
from support.hosts import Hosts
from support.keeper import wait_until

pytestmark = pytest.mark.integration

ADDRESS = "10.77.31.50"  # of a service; it moves along
TRIPS = 20
WEB = """
import socket, threading
answered, lock, listener = 0, threading.Lock(), socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("0.0.0.0", 8000))
listener.listen(128)
def serve(client):
    global answered
    for line in client.makefile("rb"):
        with lock:
            answered += 1
            number = answered
        client.sendall(b"%d %s" % (number, line))
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


def run(host: Host, name: str, *argv: str | Path, options: tuple[str, ...] = ()) -> None:
    host.criuctl("run", "--name", name, "--detach", *options, "--", *argv)


def prompt(host: Host, name: str) -> None:
    """Wait until the shell has asked."""
    host.criuctl("wait", name, "--prompt", "--timeout", "30")


def test_a_session_moves_with_its_workspace_and_comes_back(hosts: Hosts) -> None:
    """The terminal, half of a line, a job, files of every kind; the way back sends only what has
    changed.
    """
    a, b = hosts.a, hosts.b
    work = a.path("/srv/task")
    work.mkdir(parents=True)
    (work / "notes").write_text("of a\n")
    os.link(work / "notes", work / "also-notes")
    (work / "link").symlink_to("notes")
    (work / "private").mkdir(mode=0o700)
    with (work / "private" / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 30)
        sparse.write(b"end")
    os.setxattr(work / "notes", "trusted.kind", b"notes")
    os.chown(work / "notes", 12, 34)
    os.utime(work / "notes", ns=(1_600_000_000_000_000_001, 1_600_000_000_000_000_002))
    run(a, "work", "bash", "--norc", "--noprofile", options=("--workspace", "/srv/task"))
    prompt(a, "work")
    a.criuctl("send", "work", "--text", "X=40; exec 5>>log; sleep 1000 &", "--enter")
    prompt(a, "work")
    a.criuctl("send", "work", "--text", "echo half-")
    wait_until(
        lambda: "echo half-" in str(a.criuctl("capture", "work")["lines"]),
        30,
        "the shell has read it",
    )

    report = a.criuctl("migrate", "work", b.ssh_url)
    assert (report["session"], report["from"], report["host"], report["incarnation"]) == (
        "work",
        "host-a",
        "host-b",
        2,
    )
    assert report["frozen_ms"] <= report["total_ms"]
    out, came = a.criuctl("events")[-1], b.criuctl("events")[-1]
    assert [
        out[key] == came[key] for key in ("session", "session_id", "incarnation", "checkpoint")
    ] == [True] * 4
    assert (out["operation"], out["to"], came["operation"], came["incarnation"]) == (
        "migrate",
        "host-b",
        "receive",
        2,
    )
    assert not a.processes("sleep") and len(b.processes("sleep", "1000")) == 1
    there = b.path("/srv/task")
    assert sorted(path.name for path in there.iterdir()) == [
        "also-notes",
        "link",
        "log",
        "notes",
        "private",
    ]
    assert (there / "notes").stat().st_ino == (there / "also-notes").stat().st_ino
    assert os.readlink(there / "link") == "notes"
    assert os.getxattr(there / "notes", "trusted.kind") == b"notes"
    status = (there / "notes").stat()
    assert (status.st_uid, status.st_gid, status.st_mtime_ns) == (12, 34, 1_600_000_000_000_000_002)
    sparse_status = (there / "private" / "sparse").stat()
    assert sparse_status.st_size == 1 << 30 and sparse_status.st_blocks * 512 < 1 << 22
    b.criuctl("send", "work", "--text", "typed; echo from-$((X + 2)) >&5; jobs", "--enter")
    b.criuctl("wait", "work", "--match", r"half-typed\s[^$]*Running +sleep 1000", "--timeout", "30")
    wait_until(lambda: (there / "log").read_text() == "from-42\n", 30, "the shell writes on")
    away = a.criuctl("status", "work")
    assert (away["home"], away["pid"]) == ("host-b", None), away

    (there / "new").write_text("of b\n")
    back = b.criuctl("migrate", report["pid"], a.ssh_url)  # however it is named
    assert (back["host"], back["incarnation"]) == ("host-a", 3)
    assert (work / "new").read_text() == "of b\n"
    assert (work / "log").read_text() == "from-42\n"
    prompt(a, "work")
    a.criuctl("send", "work", "--text", "echo home-$((X + 3))", "--enter")
    a.criuctl("wait", "work", "--match", r"home-43", "--timeout", "30")
    assert a.criuctl("status", "work")["home"] == "host-a"
    again = a.criuctl("migrate", "work", b.ssh_url)
    assert again["bytes"]["stored"] < report["bytes"]["stored"]


@contextmanager
def clients(host: Host, number: int) -> Iterator[list[tuple[int, bytes]]]:
    """Clients on `host` that ask the service all the time, each on one connection: the answers, as
    they came.
    """
    answers: list[tuple[int, bytes]] = []
    failures: list[str] = []
    over = threading.Event()

    def ask(name: int) -> None:
        try:
            with host.connect(ADDRESS, 8000, timeout=60) as server:
                answer = server.makefile("rb")
                count = 0
                while not over.wait(0.01):
                    count += 1
                    server.sendall(b"%d-%d\n" % (name, count))
                    number, _, echo = answer.readline().partition(b" ")
                    assert echo == b"%d-%d\n" % (name, count)
                    answers.append((int(number), echo))
        except Exception as error:
            failures.append(repr(error))

    def served() -> set[bytes]:
        return {echo.partition(b"-")[0] for _, echo in list(answers)}

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(number)]
    for thread in threads:
        thread.start()
    try:
        wait_until(
            lambda: len(served()) == number or failures, 60, "every client has its connection"
        )
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert failures == []


def wait_answered(answers: list[tuple[int, bytes]]) -> None:
    """Wait until some more have come."""
    before = len(answers)
    wait_until(lambda: len(answers) > before + 30, 60, "the clients are answered")


def test_a_server_moves_under_load_and_its_clients_notice_nothing(hosts: Hosts) -> None:
    """Back and forth with its address and its established connections: every request is answered,
    and counted, once.
    """
    a, b, c = hosts.a, hosts.b, hosts.c
    a.sh(f"ip address add {ADDRESS}/24 dev eth0")
    run(a, "web", sys.executable, "-I", "-S", "-c", WEB)
    a.wait_listening(8000)
    frozen = []
    with clients(c, 3) as answers:
        for trip in range(TRIPS):
            here, there = (a, b) if trip % 2 == 0 else (b, a)
            wait_answered(answers)
            report = here.criuctl(
                "migrate",
                "web",
                there.ssh_url,
                "--keep-address",
                ADDRESS,
                "--connections",
                "keep",
                "--no-pre-copy",
            )
            assert [c["outcome"] for c in report["connections"]] == ["kept"] * 3
            assert ADDRESS in there.sh("ip address show") and ADDRESS not in here.sh(
                "ip address show"
            )
            frozen.append(report["frozen_ms"])
        wait_answered(answers)
    print("frozen, ms:", *sorted(frozen))
    assert sorted(number for number, _ in answers) == list(range(1, len(answers) + 1))
    for host in (a, b):
        assert "CRIU" not in host.sh("nft list tables")


def test_a_client_of_a_database_goes_on_with_its_next_statement(
    hosts: Hosts, postgres_server: PostgresServer
) -> None:
    """The server is on a third host; the connection is made again from the new one, with all that
    the session held.
    """
    port = postgres_server.port
    program = f"""
import psycopg
place = "host={hosts.c.address} port={port} user=trust dbname=postgres"
one = psycopg.connect(place, autocommit=True)
one.execute("SET application_name = 'moves'")
one.execute("PREPARE twice AS SELECT $1::int * 2")
while True:
    number = int(input("number: "))
    print("twice", one.execute("EXECUTE twice(%d)" % number).fetchone()[0],
        one.execute("SHOW application_name").fetchone()[0], flush=True)
"""
    with Relay(hosts.c, port):
        run(hosts.a, "client", sys.executable, "-c", program)
        hosts.a.criuctl("wait", "client", "--match", "number: ", "--timeout", "30")
        report = hosts.a.criuctl("migrate", "client", hosts.b.ssh_url, "--connections", "reconnect")
        assert [c["outcome"] for c in report["connections"]] == ["reconnected"], report
        hosts.b.criuctl("send", "client", "--text", "21", "--enter")
        said = hosts.b.criuctl("wait", "client", "--match", "twice 42 moves", "--timeout", "30")
        assert "42" in json.dumps(said)


def test_a_build_in_progress_ends_with_the_right_result(hosts: Hosts) -> None:
    """Compilers come and go while it moves, and what they have made so far travels."""
    a, b = hosts.a, hosts.b
    folder = a.path("/srv/build")
    folder.mkdir(parents=True)
    for number in range(30):
        (folder / f"f{number}.c").write_text(f"int f{number}(void) {{ return {number}; }}\n")
    calls = " + ".join(f"f{n}()" for n in range(30))
    declared = "".join(f"int f{n}(void);\n" for n in range(30))
    (folder / "main.c").write_text(
        f'#include <stdio.h>\n{declared}int main(void) {{ printf("%d\\n", {calls}); return 0; }}\n'
    )
    (folder / "build").write_text("""
        set -e
        export TMPDIR=$PWD  # a compiler's files between two of its programs are open in no process
        for file in f*.c; do
            cc -c -o "${file%.c}.o" "$file"
            # in progress until it has moved
            while [ "$file" = f17.c ] && [ ! -e moved ]; do cc -c -o f17.o f17.c; done
        done
        cc -o result main.c *.o
        ./result >sum
    """)
    run(a, "build", "sh", "./build", options=("--workspace", "/srv/build"))
    wait_until(lambda: len(list(folder.glob("*.o"))) > 5, 60, "something is built")
    assert not (folder / "sum").exists()
    a.criuctl("migrate", "build", b.ssh_url)
    b.path("/srv/build/moved").touch()
    done = b.criuctl("wait", "build", "--exit", "--timeout", "60")
    assert done["exit_code"] == 0, b.criuctl("capture", "build")
    assert b.path("/srv/build/sum").read_text() == f"{sum(range(30))}\n"
    assert not (folder / "sum").exists()


def test_all_obstacles_are_reported_at_once(hosts: Hosts) -> None:
    """Before the freeze, all of it, each with a remedy; nothing is touched on either host."""
    a, b = hosts.a, hosts.b
    a.path("/srv/only-here").mkdir(parents=True)
    a.path("/srv/only-here/data").write_text("data\n")
    program = """
import os, socket, time
os.chdir("/srv/only-here")
file = open("data")
listener = socket.create_server(("0.0.0.0", 8001))
print("up", flush=True)
time.sleep(1000)
"""
    run(a, "stays", sys.executable, "-I", "-S", "-c", program)
    a.criuctl("wait", "stays", "--match", "up", "--timeout", "30")
    with b.open_socket() as taken:
        taken.bind(("0.0.0.0", 8001))
        taken.listen()
        for options in (("--dry-run",), ()):
            answer = a.criuctl("migrate", "stays", b.ssh_url, *options, check=False)
            assert answer["exit_code"] == 4
            findings = [
                f
                for f in (answer if options else answer["error"])["findings"]
                if f["level"] == "error"
            ]
            text = " ".join(f["text"] for f in findings)
            assert "/srv/only-here/data" in text and "8001" in text, findings
            assert all(f["hint"] for f in findings)
    assert a.criuctl("status", "stays")["state"] == "running"
    wait_until(lambda: not b.processes("receive"), 60, "the receiver there has ended, too")
    missing = a.criuctl("migrate", "stays", "nowhere", check=False)
    assert (missing["exit_code"], missing["error"]["code"]) == (2, "usage")
    refused = a.criuctl("migrate", "stays", f"{b.ssh_url}:23", check=False)
    assert refused["exit_code"] == 7 and "refused" in refused["error"]["message"], refused
    report = a.criuctl("migrate", "stays", b.ssh_url, "--with-files", "/srv/only-here", "--dry-run")
    assert report["ok"]

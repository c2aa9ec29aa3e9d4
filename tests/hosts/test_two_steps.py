"""Moving by way of a store: dump on A to S3, A and its disk are lost, restore on B, which has never
heard of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hosts_lab.host import Host
from hosts_lab.relay import Relay
from servers.radosgw import RadosGateway
from support.hosts import Hosts
from support.keeper import wait_until

pytestmark = pytest.mark.integration

# A terminal program that asks, and a child that counts into a file of A: both are to go on, and the
# file with them.
PROGRAM = """
import os, time, pathlib
if os.fork() == 0:
    with open("/srv/task/numbers", "a") as numbers:
        n = 0
        while True:
            n += 1
            print(n, file=numbers, flush=True)
            time.sleep(0.01)
heap = os.urandom(1 << 20) * 4
print("ready", flush=True)
while True:
    line = input()
    print("read", repr(line), len(heap), os.uname().nodename, flush=True)
"""


@pytest.fixture
def store(hosts: Hosts, radosgw_server: RadosGateway) -> Iterator[dict[str, str]]:
    """The S3 server, on a third host; the variables with which criuctl of the others finds it."""
    bucket = f"two-steps-{hosts.supervisor_pid}"
    radosgw_server.make_bucket(bucket)
    with Relay(hosts.c, radosgw_server.port) as relay:
        yield radosgw_server.env | {
            "AWS_ENDPOINT_URL": f"http://{relay.address}",
            "CRIUCTL_STORE": f"s3://{bucket}/moved",
        }


def test_dump_on_one_host_restore_on_another(hosts: Hosts, store: dict[str, str]) -> None:
    """The session goes on where it stood: its memory, its child, its file, and the half of a line
    that was typed.
    """
    a = hosts.a
    a.env |= store
    a.criuctl("store", "init")
    a.path("/srv/task").mkdir(parents=True)
    a.path("/srv/program.py").write_text(PROGRAM)
    a.criuctl("run", "--name", "work", "--detach", "--", "python3.11", "-S", "/srv/program.py")
    a.criuctl("wait", "work", "--match", "ready", "--timeout", "30")
    wait_until(lambda: a.path("/srv/task/numbers").stat().st_size > 20, 30, "the child counts")
    a.criuctl("send", "work", "--text", "half-")
    report = a.criuctl(
        "dump", "work", "--with-files", "/srv/task/numbers", "--with-files", "/srv/program.py"
    )
    assert report["terminals"][0]["queued"] == len("half-")
    written = a.path("/srv/task/numbers").read_text()
    (key,) = (a.path(f"/etc/criuctl/keys/{name}") for name in a.sh("ls /etc/criuctl/keys").split())
    kept = key.name, key.read_bytes()  # what the operator has in a safe
    hosts.lose(a)

    b = hosts.b
    b.env |= store
    b.path("/etc/criuctl/keys").mkdir(mode=0o700)
    b.path(f"/etc/criuctl/keys/{kept[0]}").write_bytes(kept[1])
    b.path(f"/etc/criuctl/keys/{kept[0]}").chmod(0o600)
    assert [row["session"] for row in b.criuctl("list")] == ["work"]
    answer = b.criuctl("restore", "work")
    assert (answer["session"], answer["incarnation"]) == ("work", 2)
    numbers = b.path("/srv/task/numbers")
    wait_until(lambda: numbers.stat().st_size > len(written) + 20, 30, "the child counts on")
    counted = [int(line) for line in numbers.read_text().split("\n")[:-1]]
    assert counted == list(range(1, len(counted) + 1))
    assert numbers.read_text().startswith(written)
    offset = b.criuctl("send", "work", "--text", "typed", "--enter")["offset"]
    said = b.criuctl(
        "wait",
        "work",
        "--match",
        r"read '[a-z-]*' [0-9]+ \S+",
        "--since",
        str(offset),
        "--timeout",
        "30",
    )
    assert f"read 'half-typed' {4 << 20} host-b" in json.dumps(said)
    assert_session_of(b, "work")


def assert_session_of(host: Host, name: str) -> None:
    """The host knows the session as one of its own: it can be dumped there again."""
    assert [row["session"] for row in host.criuctl("ls")] == [name]
    assert host.criuctl("dump", name)["number"] == 2
    assert host.processes("/srv/program.py") == []

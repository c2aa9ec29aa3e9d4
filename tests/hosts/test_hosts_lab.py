"""The hosts of the lab are hosts of their own, the wire between them follows its settings, and
nothing of them stays.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hosts_lab import root
from hosts_lab.host import PROJECT
from support.hosts import Hosts
from support.keeper import wait_until

pytestmark = pytest.mark.integration

COUNTER = (
    "import time\nn = 0\nwhile True:\n    n += 1\n    print(n, flush=True)\n    time.sleep(0.01)\n"
)
ABANDONED = """
import sys
from support.hosts import Hosts
hosts = Hosts()
hosts.a.spawn(["sleep", "1000"])
hosts.a.criuctl("run", "--name", "s", "--detach", "--", "sleep", "1000")
print(hosts.supervisor_pid, hosts.a.init_pid, hosts.b.init_pid, flush=True)
sys.stdin.read()
"""


def test_each_is_a_host_of_its_own(hosts: Hosts) -> None:
    """Names, ids, files, processes and control groups of one are not those of the other, nor of
    this machine.
    """
    here = [
        Path(path).read_text() for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")
    ]
    ids = [
        host.sh("cat /etc/machine-id /proc/sys/kernel/random/boot_id").splitlines()
        for host in (hosts.a, hosts.b)
    ]
    assert len({*ids[0], *ids[1], *map(str.strip, here)}) == 6
    assert [host.sh("hostname; cat /etc/hostname").split() for host in (hosts.a, hosts.b)] == [
        ["host-a"] * 2,
        ["host-b"] * 2,
    ]
    hosts.a.sh(
        "echo a >/etc/new; echo a >/usr/lib/new; echo a >/tmp/new; echo a >/run/new; rm "
        "/usr/bin/mawk"
    )
    for path in ("/etc/new", "/usr/lib/new", "/tmp/new", "/run/new"):
        assert hosts.a.path(path).read_text() == "a\n"
        assert not hosts.b.path(path).exists()
        assert not Path(path).exists()
    hosts.b.sh("test -x /usr/bin/mawk")
    sleeper = hosts.a.spawn(["sleep", "1000"])
    inner = hosts.a.inner_pid(sleeper.pid)
    assert 300 <= inner < 400
    assert hosts.a.outer_pid(inner) == sleeper.pid
    assert hosts.a.processes("sleep") == [sleeper.pid]
    assert hosts.b.processes("sleep") == []
    for host in (hosts.a, hosts.b):
        host.criuctl("run", "--name", "same", "--detach", "--", "sleep", "1000")
    assert [row["session"] for row in hosts.a.criuctl("ls")] == ["same"]
    hosts.a.criuctl("kill", "same")
    assert hosts.b.criuctl("status", "same")["state"] == "running"


def test_a_tree_is_dumped_and_restored_on_a_host(hosts: Hosts) -> None:
    """CRIU takes such a host's files, which are an overlay's, for those of any other."""
    process = hosts.a.spawn(
        [sys.executable, "-I", "-S", "-c", COUNTER], stdout="/var/log/numbers", cwd="/var/tmp"
    )
    numbers = hosts.a.path("/var/log/numbers")
    wait_until(lambda: numbers.stat().st_size > 30, 30, "the program counts")
    report = hosts.a.criuctl("dump", hosts.a.inner_pid(process.pid))
    assert process.wait(60) == -signal.SIGKILL
    size = numbers.stat().st_size
    answer = hosts.a.criuctl("restore", report["checkpoint"])
    wait_until(lambda: numbers.stat().st_size > size + 30, 30, "it counts on")
    assert hosts.a.outer_pid(answer["pid"]) in hosts.a.processes(COUNTER[:20])
    counted = [int(line) for line in numbers.read_text().split("\n")[:-1]]
    assert counted == list(range(1, len(counted) + 1))
    assert hosts.a.criuctl("doctor")["ok"]


def test_ssh_from_one_to_the_other(hosts: Hosts) -> None:
    """Names, addresses and keys are known; the other one's criuctl is on its PATH, with the
    variables that a test sets for it.
    """
    hosts.b.set_command_environment("version", {"CRIUCTL_CRIU": "/nowhere"})
    assert hosts.b.ssh_url == "ssh://root@10.77.31.2"
    assert hosts.a.sh(f"ssh {hosts.b.ssh_url} hostname; ssh host-a hostname") == "host-b\nhost-a\n"
    assert json.loads(hosts.a.sh(f"ssh {hosts.b.ssh_url} criuctl version --json"))["criu"] is None
    assert hosts.a.criuctl("version")["criu"]


def test_a_cut_wire_is_silent_and_can_be_mended(hosts: Hosts) -> None:
    """No reset, no refusal: a waiting process goes on waiting, and what was sent arrives when the
    wire is whole again.
    """
    listener = hosts.b.open_socket()
    listener.bind((hosts.b.address, 7000))
    listener.listen()
    with (
        listener,
        hosts.a.connect(hosts.b.address, 7000) as one,
        hosts.c.connect(hosts.b.address, 7000) as third,
    ):
        accepted = {}
        for _ in range(2):
            other, address = listener.accept()
            other.settimeout(60)
            accepted[address[0]] = other
        hosts.cut(hosts.a, hosts.b)
        one.sendall(b"late")
        third.sendall(b"now")
        assert accepted[hosts.c.address].recv(10) == b"now"
        accepted[hosts.a.address].settimeout(0.3)
        with pytest.raises(TimeoutError):
            accepted[hosts.a.address].recv(10)
        with pytest.raises(TimeoutError):
            hosts.a.connect(hosts.b.address, 7000, timeout=0.3)
        hosts.mend()
        accepted[hosts.a.address].settimeout(60)
        assert accepted[hosts.a.address].recv(10) == b"late"
        for other in accepted.values():
            other.close()


def test_a_slow_and_lossy_wire(hosts: Hosts) -> None:
    """The rate is kept to, and what is lost comes nevertheless: as a bad line, not as a broken
    one.
    """
    with hosts.b.open_socket() as listener:
        listener.bind((hosts.b.address, 7000))
        listener.listen()

        def seconds() -> float:
            with hosts.a.connect(hosts.b.address, 7000) as one, listener.accept()[0] as other:
                began = time.monotonic()
                sender = threading.Thread(target=one.sendall, args=(bytes(2 << 20),))
                sender.start()
                size = 0
                while size < 2 << 20 and (piece := other.recv(1 << 16)):
                    size += len(piece)
                sender.join()
                assert size == 2 << 20
                return time.monotonic() - began

        hosts.slow(rate="20mbit", loss=0.005)
        assert seconds() > 0.6  # 0.84 s by the rate, less what fits into the bucket
        hosts.fast()
        # 3 ms when nothing else runs
        wait_until(lambda: seconds() < 0.5, 60, "the wire is as fast as it was")


def test_a_wire_that_takes_its_time(hosts: Hosts) -> None:
    """Each packet is held on its way out of one port and into the other; much passes nevertheless,
    and a cut is a cut.
    """

    def exchange() -> float:
        """Seconds for one packet there and one back; a busy machine makes it longer, never
        shorter.
        """
        began = time.monotonic()
        hosts.a.connect(hosts.b.address, 7000).close()
        return time.monotonic() - began

    with hosts.b.open_socket() as listener:
        listener.bind((hosts.b.address, 7000))
        listener.listen(128)
        # 1 ms when nothing else runs
        wait_until(lambda: exchange() < 0.04, 60, "a packet is there and back at once")
        hosts.slow(delay=0.01)
        assert min(exchange() for _ in range(3)) >= 0.04
    hosts.a.sh("head -c 2M /dev/urandom >/tmp/much")
    hosts.a.sh(f"ssh {hosts.b.ssh_url} cat '>/tmp/much' </tmp/much", timeout=100)
    assert hosts.a.sh("md5sum </tmp/much") == hosts.b.sh("md5sum </tmp/much")
    hosts.cut(hosts.a, hosts.b)
    with pytest.raises(TimeoutError):
        hosts.a.connect(hosts.b.address, 22, timeout=0.3)
    hosts.mend()
    hosts.fast()
    hosts.a.connect(hosts.b.address, 22).close()


def test_a_lost_host(hosts: Hosts) -> None:
    """Its processes end at once, and the one that comes in its place has nothing of its disk."""
    hosts.a.sh("echo mine >/var/lib/criuctl/mine; echo mine >/etc/mine")
    sleeper = hosts.a.spawn(["sleep", "1000"])
    first = hosts.a
    hosts.lose(first)
    assert sleeper.wait(60) == -signal.SIGKILL
    assert not os.path.exists(f"/proc/{first.init_pid}")
    assert hosts.a is not first
    assert hosts.a.sh("ls /var/lib/criuctl; ls /etc/mine 2>/dev/null || hostname") == "host-a\n"


@pytest.mark.parametrize("victim", ["tests", "supervisor"])
def test_nothing_stays_when_tests_or_supervisor_are_killed(victim: str) -> None:
    """kill -9 of the tests, or of the hosts' supervisor: no process, no control group, no file of a
    host is left.
    """
    keys = set(Path("/tmp").glob("hosts-keys-*"))
    tests = subprocess.Popen(
        [sys.executable, "-c", ABANDONED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(PROJECT / "tests")},
        text=True,
    )
    try:
        assert tests.stdout is not None
        supervisor, *inits = map(int, tests.stdout.readline().split())
        groups = [
            group
            for each in root.hierarchies()
            for group in Path(each.path).glob(f"hosts-lab-{supervisor}-*")
        ]
        assert groups
        members = [
            int(pid)
            for group in groups
            for procs in group.rglob("cgroup.procs")
            for pid in procs.read_text().split()
        ]
        assert set(inits) <= set(members)
        os.kill(tests.pid if victim == "tests" else supervisor, signal.SIGKILL)
        wait_until(
            lambda: not any(_lives(pid) for pid in (*members, supervisor)),
            60,
            "every process of the hosts is gone",
        )
        if victim == "supervisor":
            tests.communicate(timeout=60)
            Hosts().close()  # the next one removes what the killed one could not
        wait_until(
            lambda: not any(group.exists() for group in groups), 60, "their control groups are gone"
        )
        assert set(Path("/tmp").glob("hosts-keys-*")) <= keys
    finally:
        tests.kill()
        tests.communicate(timeout=60)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

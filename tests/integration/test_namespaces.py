"""Trees that live in other namespaces than criuctl: entered, not failed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import oracle
from support.command import Criuctl, Home
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Zoo

from criuctl.config import Config
from criuctl.criu import binary

pytestmark = pytest.mark.integration

OUTPUT = (
    "*/descriptors/[12]/size",
    "*/descriptors/[12]/offset",
)  # the command that made the namespaces complains there at its end


def test_another_mount_namespace(zoo: Zoo, trip: Trip) -> None:
    """Its files are the host's, its mounts a copy of them."""
    animal = zoo.launch("files.py", prefix=["unshare", "--mount", "--"])
    restored = trip.restore(trip.dump(animal), animal, ignore=("*/namespaces/mnt",))
    restored.ask()


def test_another_pid_namespace_whose_root_is_not_dumped(zoo: Zoo, trip: Trip) -> None:
    """The tree hangs below another init: it is dumped by its PID here."""
    animal = zoo.launch(
        "family.py",
        prefix=[
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            "sh",
            "-c",
            'setsid --wait "$@"; true',
            "sh",
        ],
    )
    assert oracle.inner_pid(animal.pid) != 1
    restored = trip.restore(trip.dump(animal), animal, ignore=(*oracle.NEW_NAMESPACE, *OUTPUT))
    restored.ask()


def test_a_deleted_name_where_the_host_has_another_folder(zoo: Zoo, trip: Trip) -> None:
    """CRIU's helper link for it does not stay in the folder that the tree has there."""
    mount = (
        "mkdir own real; mount --bind real own; echo kept >own/f; ln own/f own/g; exec 7<>own/f; "
        'rm own/f; exec "$@"'
    )
    animal = zoo.launch("counter.py", prefix=["unshare", "--mount", "sh", "-c", mount, "sh"])
    trip.dump(animal)
    assert [path.name for path in (animal.folder / "real").iterdir()] == ["g"]


def test_a_tree_that_is_pid_1_of_its_namespace(zoo: Zoo, trip: Trip) -> None:
    animal = zoo.launch(
        "counter.py", prefix=["unshare", "--pid", "--fork", "--mount-proc", "setsid"]
    )
    assert oracle.inner_pid(animal.pid) == 1
    restored = trip.restore(trip.dump(animal), animal, ignore=(*oracle.NEW_NAMESPACE, *OUTPUT))
    assert restored.answer["inner_pid"] == 1
    restored.ask()
    trip.restore(trip.dump(restored), restored, ignore=(*oracle.NEW_NAMESPACE, *OUTPUT)).ask()


def test_what_a_tree_that_is_pid_1_has_in_a_tmpfs_of_its_own(zoo: Zoo, trip: Trip) -> None:
    """It comes back with its mount, also where the host has another file of that name, which stays
    as it is.
    """
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c"]
    mount = (
        "mkdir own; echo host >own/f; mount -t tmpfs own own; exec 7<>own/f; echo mine >&7; exec "
        'setsid "$@"'
    )
    animal = zoo.launch("counter.py", prefix=[*prefix, mount, "sh"])
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        animal.ask()
        inside = Path(f"/proc/{animal.pid}/root{animal.folder}/own/f")
        assert inside.read_text() == "mine\n" and inside.samefile(f"/proc/{animal.pid}/fd/7")
        assert (animal.folder / "own/f").read_text() == "host\n"


def test_a_deleted_name_in_a_tmpfs_of_its_own(zoo: Zoo, trip: Trip) -> None:
    """Of a file that has another one: the helper link is on the tree's side, and travels with the
    tmpfs.
    """
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c"]
    mount = (
        "mkdir own; mount -t tmpfs own own; echo mine >own/f; ln own/f own/g; exec 7<own/g; rm "
        'own/g; exec setsid "$@"'
    )
    animal = zoo.launch("counter.py", prefix=[*prefix, mount, "sh"])
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        animal.ask()
        inside = Path(f"/proc/{animal.pid}/root{animal.folder}/own")
        assert [file.name for file in inside.iterdir()] == ["f"]
        assert (inside / "f").samefile(f"/proc/{animal.pid}/fd/7")
        assert list((animal.folder / "own").iterdir()) == []


_OWN_DEVPTS = (
    "mount -t devpts -o newinstance,ptmxmode=666 x /dev/pts; mount --bind /dev/pts/ptmx /dev/ptmx; "
)
_CONSOLE = """import os, pty, subprocess, sys
master, slave = pty.openpty()
open("console", "w").close()
subprocess.run(["mount", "--bind", os.ttyname(slave), "console"], check=True)
for fd in (master, slave): os.set_inheritable(fd, True)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c")


def test_terminals_of_a_devpts_of_its_own(zoo: Zoo, trip: Trip) -> None:
    """Their numbers are free there, whatever the host has; one that is mounted, as a console, comes
    back time and again.
    """
    taken = [os.openpty() for _ in range(3)]
    try:
        prefix = [
            *_AS_PID_1,
            f'{_OWN_DEVPTS} exec setsid "$@"',
            "sh",
            sys.executable,
            "-c",
            _CONSOLE,
        ]
        animal = zoo.launch("counter.py", prefix=prefix)
        for _ in range(2):
            animal = trip.restore(trip.dump(animal), animal, equal=False)
            assert not any("terminals" in text for text in animal.answer["warnings"])
            inside = Path(f"/proc/{animal.pid}/root")
            assert (inside / "dev/pts/0").samefile(
                inside / str(animal.folder / "console").lstrip("/")
            )
            animal.ask()
    finally:
        for fd in (fd for pair in taken for fd in pair):
            os.close(fd)


def test_a_terminal_of_the_host_that_is_mounted(zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch(
        "counter.py", prefix=[*_AS_PID_1, 'exec setsid "$@"', "sh", sys.executable, "-c", _CONSOLE]
    )
    answer = criuctl("dump", animal.pid, check=False)
    assert [f["code"] for f in answer["error"]["findings"]] == ["terminal-mounted"]
    animal.ask()


@pytest.mark.parametrize("held", [True, False])
def test_a_console_that_is_held_from_outside(
    held: bool, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """The mount shows the terminal that a restore makes, not the one that has its number by then;
    refused if it makes none.
    """
    master, slave = os.openpty()
    console = (
        f": >console; mount --bind {os.ttyname(slave)} console; "
        f'{"exec 7<>console;" if held else ""} exec setsid "$@"'
    )
    animal = zoo.launch("counter.py", prefix=[*_AS_PID_1, console, "sh"])
    os.close(slave)
    report = trip.dump(animal) if held else criuctl("dump", animal.pid, check=False)
    os.close(master)
    if not held:
        assert [(f["code"], f["pid"]) for f in report["error"]["findings"]] == [
            ("terminal-mounted", animal.pid)
        ]
        animal.ask()
        return
    taken = [fd for _ in range(3) for fd in os.openpty()]
    try:
        animal = trip.restore(report, animal, equal=False)
        node = Path(f"/proc/{animal.pid}/root{animal.folder}/console")
        assert node.samefile(f"/proc/{animal.pid}/fd/7")
        assert node.stat().st_rdev not in {os.fstat(fd).st_rdev for fd in taken}
        animal.ask()
        criuctl("kill", animal.answer["session"])
    finally:
        for fd in taken:
            os.close(fd)


def test_a_mount_that_hides_criu(zoo: Zoo, criuctl: Criuctl) -> None:
    folder = os.path.dirname(binary.find(Config()).argv[0])
    animal = zoo.launch(
        "counter.py",
        prefix=["unshare", "--mount", "sh", "-c", f'mount -t tmpfs t {folder}; exec "$@"', "sh"],
    )
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 4
    assert [f["code"] for f in answer["error"]["findings"]] == ["criu-hidden"]


def test_a_chroot_that_came_into_a_pid_namespace(zoo: Zoo, trip: Trip) -> None:
    """It sees no /proc, but its mount namespace has one: it can be dumped from there, again and
    again.
    """
    code = "import os, time; os.chroot('.'); fd = os.open('/n', os.O_CREAT | os.O_WRONLY); n = 0\n"
    code += "while True: n += 1; os.pwrite(fd, b'%09d' % n, 0); time.sleep(0.02)"
    animal = zoo.launch([sys.executable, "-S", "-c", code], name="jail", quiet=False)
    counter = animal.folder / "n"
    wait_until(lambda: counter.exists() and counter.read_text(), 60, "it counts")
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, "--pids", "private", equal=False)
        before = counter.read_text()
        wait_until(lambda before=before: counter.read_text() > before, 60, "it counts on")


@pytest.mark.parametrize("name", ["os.unlink('/t')", "os.link('/t', '/u'); os.unlink('/t')"])
def test_a_deleted_file_of_a_chroot_in_a_mount_namespace(name: str, zoo: Zoo, trip: Trip) -> None:
    """It is shown only some of the mounts it uses; the file comes back with what is in it."""
    code = (
        "import os, time; os.chroot('.'); fd = os.open('/t', os.O_CREAT | os.O_RDWR); "
        f"os.write(fd, b'precious'); {name}\n"
    )
    code += "n = os.open('/n', os.O_CREAT | os.O_WRONLY)\n"
    code += (
        "while True: os.pwrite(n, os.pread(fd, 99, 0) + b' %f' % time.monotonic(), 0); "
        "time.sleep(0.02)"
    )
    animal = zoo.launch(
        [sys.executable, "-S", "-c", code],
        prefix=["unshare", "--mount", "--"],
        name="jail",
        quiet=False,
    )
    said = animal.folder / "n"
    wait_until(lambda: said.exists() and said.read_text(), 60, "it runs")
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        before = said.read_text()
        wait_until(lambda before=before: said.read_text() > before, 60, "it goes on")
        assert said.read_text().startswith("precious ")


def test_a_session_led_from_outside_the_pid_namespace(zoo: Zoo, criuctl: Criuctl) -> None:
    """It has no number inside that could be saved: said before the freeze, with what to do."""
    animal = zoo.launch("counter.py", prefix=["unshare", "--pid", "--fork", "--mount-proc", "--"])
    animal.remember()
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 4
    assert "setsid" in answer["error"]["hint"]
    assert animal.differences(animal) == []
    animal.ask()


def test_its_own_hostname(zoo: Zoo, trip: Trip) -> None:
    animal = zoo.launch(
        "counter.py", prefix=["unshare", "--uts", "sh", "-c", 'hostname zoo-host; exec "$@"', "sh"]
    )
    restored = trip.restore(trip.dump(animal), animal, ignore=("*/namespaces/uts",))
    name = subprocess.run(
        ["nsenter", "-t", str(restored.pid), "-u", "hostname"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert name.stdout.strip() == "zoo-host"


@pytest.fixture
def network(home: Home) -> Iterator[str]:
    """A named net namespace with its loopback up."""
    subprocess.run(["ip", "netns", "add", home.token], check=True)
    try:
        subprocess.run(["ip", "-n", home.token, "link", "set", "lo", "up"], check=True)
        yield home.token
    finally:
        subprocess.run(["ip", "netns", "del", home.token], check=True)


def test_a_named_net_namespace(network: str, zoo: Zoo, trip: Trip) -> None:
    """Listeners and loopback connections of another network, restored into that network."""
    animal = zoo.launch("sockets.py", prefix=["nsenter", f"--net=/run/netns/{network}", "--"])
    restored = trip.restore(trip.dump(animal), animal)
    restored.ask()


def test_a_net_namespace_without_a_name(zoo: Zoo, trip: Trip) -> None:
    """It dies with its tree, and is made again."""
    animal = zoo.launch(
        "sockets.py",
        prefix=["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"],
    )
    restored = trip.restore(
        trip.dump(animal), animal, ignore=("*/namespaces/net", *oracle.NEW_NAMESPACE, *OUTPUT)
    )
    restored.ask()


_NOT_SAVED = (
    "ip link set lo up; ip link add v0 type veth peer name v1; ip link add m0 link v0 type macvlan"
)
"""CRIU cannot make such an interface again, and so does not save the namespace."""


def _net(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def test_a_net_namespace_that_has_only_the_number_of_the_old_one(zoo: Zoo, trip: Trip) -> None:
    """The kernel gives a number again at once: whose namespace has it now is left alone."""
    animal = zoo.launch(
        "sockets.py", prefix=["unshare", "--net", "sh", "-c", f'{_NOT_SAVED}; exec "$@"', "sh"]
    )
    for round_ in range(5):  # another program may be faster, and have the number
        old, report = _net(animal.pid), trip.dump(animal)
        taken = _taken_by_a_stranger(old, zoo, round_)
        animal = trip.restore(report, animal, equal=False)
        assert _net(animal.pid) not in ((old, _net(os.getpid())) if taken else (_net(os.getpid()),))
        assert ["is gone; a new one" in text for text in animal.answer["warnings"]] == [True]
        subprocess.run(["nsenter", "-t", str(animal.pid), "-n", "sh", "-c", _NOT_SAVED], check=True)
        animal.ask()
        if taken:
            return
    pytest.fail("no stranger ever got the number of the old one")


def _taken_by_a_stranger(number: int, zoo: Zoo, round_: int) -> bool:
    for n in range(20):
        stranger = zoo.launch(
            ["sleep", "600"], prefix=["unshare", "--net"], name=f"stranger-{round_}-{n}"
        )
        wait_until(
            lambda stranger=stranger: _net(stranger.pid) != _net(os.getpid()),
            60,
            "it has a network of its own",
        )
        if _net(stranger.pid) == number:
            return True
    return False


@pytest.mark.parametrize("left_running", [False, True])
def test_a_net_namespace_with_other_living_processes(
    left_running: bool, zoo: Zoo, trip: Trip
) -> None:
    """As the other programs of a container: the tree comes back to them."""
    animal = zoo.launch(
        "sockets.py",
        prefix=["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"],
    )
    other = zoo.launch(
        ["sleep", "600"], prefix=["nsenter", "-t", str(animal.pid), "-n"], name="other"
    )
    old = _net(animal.pid)
    wait_until(lambda: _net(other.pid) == old, 60, "it has come")
    report = trip.snapshot(animal) if left_running else trip.dump(animal)
    animal.end()
    restored = trip.restore(report, animal, equal=not left_running)
    assert (_net(restored.pid), restored.answer["warnings"]) == (old, [])
    restored.ask()


def test_an_ipc_namespace_with_other_living_processes(zoo: Zoo, criuctl: Criuctl) -> None:
    """As the other programs of a pod; not one who has only made it and waits."""

    def warned() -> list[str]:
        return [
            f["text"] for f in criuctl("check", animal.pid)["findings"] if f["code"] == "shared-ipc"
        ]

    animal = zoo.launch("counter.py", prefix=["unshare", "--ipc", "--fork"])
    assert warned() == []
    other = zoo.launch(
        ["sleep", "600"], prefix=["nsenter", "-t", str(animal.pid), "-i"], name="other"
    )
    ipc = os.readlink(f"/proc/{animal.pid}/ns/ipc")
    wait_until(lambda: os.readlink(f"/proc/{other.pid}/ns/ipc") == ipc, 60, "it has come")
    (warning,) = warned()
    assert str(other.pid) in warning


def test_a_net_namespace_that_was_given_a_name_after_the_dump(
    home: Home, zoo: Zoo, trip: Trip
) -> None:
    animal = zoo.launch(
        "sockets.py",
        prefix=["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"],
    )
    old, report = _net(animal.pid), trip.snapshot(animal)
    subprocess.run(["ip", "netns", "attach", home.token, str(animal.pid)], check=True)
    try:
        animal.end()
        restored = trip.restore(report, animal, equal=False)
        assert (_net(restored.pid), restored.answer["warnings"]) == (old, [])
        restored.ask()
    finally:
        subprocess.run(["ip", "netns", "del", home.token], check=True)


def test_a_ping_socket_in_a_net_namespace_without_a_name(zoo: Zoo, trip: Trip) -> None:
    """The kernel gives one only to groups that a setting of the namespace names, in a new one to
    none.
    """
    allow = "ip link set lo up; echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range"
    run = (
        "import os, socket, sys; s = socket.socket(2, 2, 1); s.set_inheritable(True); "
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    prefix = [
        "unshare",
        "--net",
        "sh",
        "-c",
        f'{allow}; exec "$@"',
        "sh",
        sys.executable,
        "-c",
        run,
    ]
    animal = zoo.launch("counter.py", prefix=prefix)
    trip.restore(
        trip.dump(animal), animal, ignore=("*/namespaces/net", *oracle.NEW_NAMESPACE, *OUTPUT)
    ).ask()


_BOUND = """import os, socket, sys
udp, tcp, own = socket.socket(10, 2), socket.socket(), socket.socket(2, 2)
for sock in (tcp, own): sock.setsockopt(1, 25, b"v0")
for sock in (udp, tcp, own): sock.set_inheritable(True)
if sys.argv[1] == "waits":
    udp.bind(("fe80:4567::1", 7990, 0, socket.if_nametoindex("v0")))
    tcp.bind(("", 7991)); tcp.listen()
else:
    tcp.close(); own.connect(("10.9.9.2", 7992))
os.execvp(sys.argv[2], sys.argv[2:])
"""
_V0 = (
    "link add v0 type veth peer name v1",
    "addr add fe80:4567::1/64 nodad dev v0",
    "link set v0 up",
)


def test_an_interface_that_sockets_are_bound_to_is_gone(
    network: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """CRIU would fail at them half-way."""

    def make() -> None:
        for words in _V0:
            subprocess.run(["ip", "-n", network, *words.split()], check=True)

    make()
    prefix = ["nsenter", f"--net=/run/netns/{network}", "--", sys.executable, "-c", _BOUND, "waits"]
    animal = zoo.launch("counter.py", prefix=prefix)
    report = trip.dump(animal)
    subprocess.run(["ip", "-n", network, "link", "del", "v0"], check=True)
    plan = criuctl("restore", report["checkpoint"], "--dry-run", check=False)
    missing = [f for f in plan["findings"] if f["code"] == "interface-missing"]
    assert not plan["ok"] and {(f["level"], f["pid"]) for f in missing} == {("error", animal.pid)}
    assert len(missing) == 3 and all("interface v0" in f["text"] for f in missing)
    assert criuctl("restore", report["checkpoint"], check=False)["error"]["exit_code"] == 4
    make()
    trip.restore(report, animal, equal=False).ask()  # the interface has another number now


def test_a_connection_by_an_interface_that_is_gone_is_hung_up(zoo: Zoo, trip: Trip) -> None:
    """With all others: it comes without the interface."""
    links = (
        f"ip link set lo up; {'; '.join(f'ip {words}' for words in _V0)}; ip addr add 10.9.9.1/24 "
        "dev v0"
    )
    prefix = [
        "unshare",
        "--net",
        "sh",
        "-c",
        f'{links}; exec "$@"',
        "sh",
        sys.executable,
        "-c",
        _BOUND,
        "calls",
    ]
    animal = zoo.launch("counter.py", prefix=prefix)
    restored = trip.restore(trip.dump(animal), animal, equal=False)
    assert [c["outcome"] for c in restored.answer["connections"]] == ["hangup"]
    restored.ask()


def test_interfaces_that_would_end_with_the_tree(
    home: Home, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Reported before the dump, with what keeps them: the name that the remedy gives to the
    namespace.
    """
    links = f"{_NOT_SAVED}; ip addr add 10.9.9.1/24 dev v0; ip link set v0 up"
    animal = zoo.launch(
        "counter.py", prefix=["unshare", "--net", "sh", "-c", f'{links}; exec "$@"', "sh"]
    )

    def hints() -> list[str]:
        return [
            f["hint"]
            for f in criuctl("check", animal.pid)["findings"]
            if f["code"] == "own-network"
        ]

    (hint,) = hints()
    assert f"ip netns attach NAME {animal.pid}" in hint
    subprocess.run(["ip", "netns", "attach", home.token, str(animal.pid)], check=True)
    try:
        assert hints() == []
        restored = trip.restore(trip.dump(animal), animal)
        inside = ["nsenter", "-t", str(restored.pid), "-n", "ip", "-o", "-4", "addr", "show", "v0"]
        assert (
            "10.9.9.1/24"
            in subprocess.run(inside, capture_output=True, text=True, check=True).stdout
        )
    finally:
        subprocess.run(["ip", "netns", "del", home.token], check=True)


def test_all_of_them(zoo: Zoo, trip: Trip) -> None:
    """What a container runtime would make: mount, PID, net, UTS and IPC namespaces at once."""
    prefix = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--net",
        "--uts",
        "--ipc",
        "sh",
        "-c",
    ]
    animal = zoo.launch(
        "sockets.py", prefix=[*prefix, 'ip link set lo up && exec setsid "$@"', "sh"]
    )
    restored = trip.restore(trip.dump(animal), animal, ignore=("*/namespaces/*", *OUTPUT))
    restored.ask()

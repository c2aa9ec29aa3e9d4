"""Names of unix sockets that another process has by the time of a restore: a living owner keeps its
name, and is reported.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl, Home
from support.hooking import HookFolder
from support.keeper import start_time, wait_until
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

KINDS = {
    "stream": socket.SOCK_STREAM,
    "seqpacket": socket.SOCK_SEQPACKET,
    "dgram": socket.SOCK_DGRAM,
}


def names_in(folder: Path) -> dict[str, str]:
    """A kind of socket and its path, for each kind."""
    return {kind: str(folder / f"{kind}.sock") for kind in KINDS}


def words(*names: tuple[str, str]) -> list[str]:
    return [f"{kind}:{name}" for kind, name in names]


def say(word: str, name: str, kind: str = "stream") -> None:
    with socket.socket(socket.AF_UNIX, KINDS.get(kind, socket.SOCK_STREAM)) as client:
        client.connect(f"\0{name}" if kind == "abstract" else name)
        client.send(word.encode())


def inode(path: str) -> int:
    return os.lstat(path).st_ino


def errors(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert answer["exit_code"] == 4, answer
    return [f for f in answer["error"]["findings"] if f["level"] == "error"]


def test_a_copy_has_names_of_its_own_next_to_the_original(
    zoo: Zoo, trip: Trip, tmp_path: Path
) -> None:
    """Outside, the paths lead to the original; inside the copy to its own, and it cannot remove
    what is not its own.
    """
    names = names_in(zoo.home)
    original = zoo.launch("listening.py", *words(*names.items()))
    report = trip.snapshot(original, "--name", "first")
    before = {name: inode(name) for name in names.values()}
    copy = trip.restore(report, original, "--as", "second", equal=False)
    assert copy.answer["pids"] == "private"
    own = {f["path"]: f["own_copy"] for f in copy.answer["files"]}
    assert own.keys() == before.keys() and all(
        own[name].startswith(f"{name}.copy-") for name in own
    )
    for kind, name in names.items():
        (warning,) = (text for text in copy.answer["warnings"] if f"{name} leads to" in text)
        assert f"PID {original.pid} (" in warning and own[name] in warning
        assert stat.S_IMODE(os.lstat(own[name]).st_mode) == 0o640
        say("original", name, kind)
        say("copy", own[name], kind)
    assert copy.ask()["heard"] == {name: ["copy"] for name in own}
    assert original.ask()["heard"] == {name: ["original"] for name in own}
    assert {name: inode(name) for name in before} == before

    (original.folder / "remove").touch()
    assert copy.ask()["removed"] == []
    (original.folder / "remove").unlink()
    copy.end()
    for kind, name in names.items():
        say("again", name, kind)
    assert original.ask()["heard"] == {name: ["again"] for name in own}
    assert {name: inode(name) for name in before} == before


@pytest.mark.parametrize("program", ["sockets.py", "renamed.py"])
def test_copies_of_many_sockets(program: str, zoo: Zoo, trip: Trip) -> None:
    """Connections, queues and who waits to be accepted go with names of their own."""
    original = zoo.launch(program)
    report = trip.snapshot(original, "--name", "first")
    before = {path: path.lstat().st_ino for path in original.folder.rglob("*") if path.is_socket()}
    copy = trip.restore(report, original, "--as", "second", equal=False)
    assert copy.answer["files"]
    for animal in (copy, original, copy, original):
        animal.ask()
    copy.end()
    assert {path: path.lstat().st_ino for path in before} == before
    original.ask()


def test_a_copy_that_goes_and_comes_back(zoo: Zoo, trip: Trip) -> None:
    """It keeps its names, and so does the original; when that is gone, nothing is in the way."""
    name = str(zoo.home / "stream.sock")
    original = zoo.launch("listening.py", f"stream:{name}")
    before = inode(name)
    copy = trip.restore(
        trip.snapshot(original, "--name", "first"), original, "--as", "second", equal=False
    )
    (own,) = (f["own_copy"] for f in copy.answer["files"])
    report = trip.dump(copy, "--name", "second")
    assert report["warnings"] == []  # what shows its names at their paths is made again
    copy = trip.restore(report, copy, equal=False)
    assert any(f"{name} leads to" in text and own in text for text in copy.answer["warnings"])
    say("copy", own)
    assert copy.ask()["heard"] == {name: ["copy"]}  # its client went to the path that it knows
    assert original.ask()["heard"] == {name: []} and inode(name) == before
    report = trip.dump(copy, "--name", "second")
    original.end()
    copy = trip.restore(report, copy, equal=False)
    assert copy.answer["warnings"] == []
    say("copy", own)
    assert copy.ask()["heard"] == {name: ["copy"]}
    with pytest.raises(ConnectionRefusedError):
        say("nobody", name)
    report = trip.dump(copy, "--name", "second")
    os.unlink(name)
    copy = trip.restore(report, copy, equal=False)
    (warning,) = copy.answer["warnings"]
    assert name in warning and own in warning
    os.symlink(own, name)
    assert copy.ask()["heard"] == {name: []}


def test_what_only_a_copy_has_goes_when_it_is_killed(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    name = str(zoo.home / "stream.sock")
    original = zoo.launch("listening.py", f"stream:{name}")
    report = trip.snapshot(original, "--name", "first")
    copy = trip.restore(report, original, "--as", "second", equal=False)
    (own,) = (f["own_copy"] for f in copy.answer["files"])
    before = inode(name)
    assert os.path.lexists(own)
    criuctl("kill", "second")
    assert not os.path.lexists(own) and inode(name) == before
    say("original", name)
    assert original.ask()["heard"] == {name: ["original"]}


def test_a_relative_name(zoo: Zoo, trip: Trip) -> None:
    """It is one of the folder in which it was bound."""
    original = zoo.launch("listening.py", "stream:a.sock", "dgram:./b.sock")
    report = trip.snapshot(original, "--name", "first")
    copy = trip.restore(report, original, "--as", "second", equal=False)
    own = {Path(f["path"]).name: f["own_copy"] for f in copy.answer["files"]}
    assert own.keys() == {"a.sock", "b.sock"}
    say("copy", own["a.sock"])
    say("copy", own["b.sock"], "dgram")
    assert copy.ask()["heard"] == {"a.sock": ["copy"], "./b.sock": ["copy"]}
    assert original.ask()["heard"] == {"a.sock": [], "./b.sock": []}
    original.end()
    trip.restore(trip.dump(copy, "--name", "second"), copy, equal=False).ask()


def test_a_trial_next_to_the_original(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """It has all names to itself, in a shadow of the files."""
    name, abstract = str(zoo.home / "stream.sock"), f"{zoo.token}-name"
    original = zoo.launch("listening.py", f"stream:{name}", f"abstract:{abstract}")
    trip.snapshot(original, "--name", "first")
    before = inode(name)
    tried = criuctl("verify", "first", "--restore", "--probe", f"[ -S {name} ]")
    assert tried["ok"] and inode(name) == before
    say("original", name)
    assert original.ask()["heard"] == {name: ["original"], abstract: []}


def test_two_copies(zoo: Zoo, trip: Trip) -> None:
    name = str(zoo.home / "stream.sock")
    original = zoo.launch("listening.py", f"stream:{name}")
    report = trip.snapshot(original, "--name", "first")
    copies = [
        trip.restore(report, original, "--as", as_, equal=False) for as_ in ("second", "third")
    ]
    own = [copy.answer["files"][0]["own_copy"] for copy in copies]
    assert len({name, *own}) == 3
    for copy, path in zip(copies, own, strict=True):
        say("copy", path)
        assert copy.ask()["heard"] == {name: ["copy"]}
    assert original.ask()["heard"] == {name: []}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_instance_keeps_the_path(
    kind: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """It was started when the first had gone: the restore is refused, and names it; once it is
    gone, its file is nothing.
    """
    name = str(zoo.home / "a.sock")
    animal = zoo.launch("listening.py", f"{kind}:{name}")
    report = trip.dump(animal)
    os.unlink(name)
    second = zoo.launch("listening.py", f"{kind}:{name}", name="second")
    before = inode(name)
    assert criuctl("restore", report["checkpoint"], "--dry-run", check=False)["ok"] is False
    (found,) = errors(criuctl("restore", report["checkpoint"], check=False))
    assert (
        found["code"] == "socket-taken" and found["pid"] == animal.pid and found["fd"] is not None
    )
    assert (
        f"{name} is " in found["text"]
        and f"PID {second.pid} (" in found["text"]
        and "--as NAME" in found["hint"]
    )
    assert inode(name) == before
    say("second", name, kind)
    assert second.ask()["heard"] == {name: ["second"]}
    second.end()
    trip.restore(report, animal).ask()


def test_a_second_instance_in_another_network(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Paths are of no network."""
    name = str(zoo.home / "a.sock")
    animal = zoo.launch("listening.py", f"stream:{name}")
    report = trip.dump(animal)
    os.unlink(name)
    second = zoo.launch(
        "listening.py", f"stream:{name}", name="second", prefix=["unshare", "--net", "--"]
    )
    (found,) = errors(criuctl("restore", report["checkpoint"], check=False))
    assert f"PID {second.pid} (" in found["text"]
    say("second", name)
    assert second.ask()["heard"] == {name: ["second"]}


def test_the_tree_comes_from_a_mount_namespace_of_its_own(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    name = str(zoo.home / "a.sock")
    animal = zoo.launch("listening.py", f"stream:{name}", prefix=["unshare", "--mount", "--"])
    report = trip.dump(animal)
    os.unlink(name)
    second = zoo.launch("listening.py", f"stream:{name}", name="second")
    (found,) = errors(criuctl("restore", report["checkpoint"], check=False))
    assert f"PID {second.pid} (" in found["text"]
    second.end()
    trip.restore(report, animal, ignore=("*/namespaces/mnt",)).ask()


def test_the_root_was_pid_1(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """CRIU makes its mounts: the path is this host's all the same, and a copy cannot be shown
    another one.
    """
    name = str(zoo.home / "a.sock")
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "setsid"]
    animal = zoo.launch("listening.py", f"stream:{name}", prefix=prefix)
    report = trip.snapshot(animal, "--name", "first")
    (found,) = errors(criuctl("restore", "first", "--as", "second", check=False))
    assert f"PID {animal.pid} (" in found["text"]
    say("first", name)
    assert animal.ask()["heard"] == {name: ["first"]}
    animal.end()
    trip.restore(report, animal, equal=False).ask()


def test_a_path_of_a_mount_of_its_own(zoo: Zoo, trip: Trip) -> None:
    """There the host's server of that path is another one's business."""
    place = zoo.home / "place"
    place.mkdir()
    name = str(place / "a.sock")
    script = f'mount -t tmpfs tmpfs {place} && exec "$@"'
    prefix = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "setsid",
        "sh",
        "-c",
        script,
        "sh",
    ]
    animal = zoo.launch("listening.py", f"stream:{name}", prefix=prefix)
    report = trip.dump(animal)
    second = zoo.launch("listening.py", f"stream:{name}", name="second")
    trip.restore(report, animal, equal=False).ask()
    say("second", name)
    assert second.ask()["heard"] == {name: ["second"]}


@pytest.mark.parametrize("what", ["file", "folder", "link", "fifo"])
def test_something_else_at_the_path(what: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """CRIU cannot bind there; said before anything is touched."""
    name = str(zoo.home / "a.sock")
    animal = zoo.launch("listening.py", f"stream:{name}")
    report = trip.dump(animal)
    os.unlink(name)
    make: dict[str, Callable[[], object]] = {
        "file": lambda: Path(name).write_text("precious"),
        "folder": lambda: os.mkdir(name),
        "link": lambda: os.symlink("nowhere", name),
        "fifo": lambda: os.mkfifo(name),
    }
    make[what]()
    before = inode(name)
    (found,) = errors(criuctl("restore", report["checkpoint"], check=False))
    assert (
        name in found["text"]
        and {"link": "a symbolic link", "fifo": "a FIFO", "file": "a regular file"}.get(what, what)
        in (found["text"])
    )
    assert found["hint"].startswith("Move it away") and inode(name) == before
    os.rename(name, f"{name}.away")
    trip.restore(report, animal, equal=False).ask()


def test_an_abstract_name_that_is_taken(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Refused before the path of the other socket is touched; a copy gets a network of its own."""
    path, abstract = str(zoo.home / "a.sock"), f"{zoo.token}-name"
    animal = zoo.launch("listening.py", *words(("stream", path), ("abstract", abstract)))
    report = trip.dump(animal)
    before = inode(path)
    second = zoo.launch("listening.py", f"abstract:{abstract}", name="second")
    (found,) = errors(criuctl("restore", report["checkpoint"], check=False))
    assert (
        f"@{abstract}" in found["text"]
        and f"PID {second.pid} (" in found["text"]
        and found["pid"] == animal.pid
    )
    assert inode(path) == before
    second.end()
    animal = trip.restore(report, animal)
    animal.ask()
    copy = trip.restore(
        trip.snapshot(animal, "--name", "first"), animal, "--as", "copy", equal=False
    )
    assert any(
        f"@{abstract}" in text and "network of its own" in text for text in copy.answer["warnings"]
    )
    copy.ask()
    say("first", abstract, "abstract")
    say("first", path)
    assert animal.ask()["heard"] == {path: ["first"], abstract: ["first"]}


LISTENER = """
import os, signal, socket, sys
noted, name = sys.argv[1:3]
listener = socket.socket(socket.AF_UNIX)
listener.bind(name)
listener.listen()
client = socket.socket(socket.AF_UNIX)
client.connect(name)
accepted = listener.accept()[0]
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if not os.fork():
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    os.setsid()
    for sock in (client, accepted):
        os.set_inheritable(sock.fileno(), True)
    os.execv(sys.argv[3], sys.argv[3:])
client.close()
accepted.close()
with open(noted, "w") as file:
    file.write(str(os.getpid()))
while True:
    listener.accept()[0].send(b"served")
"""


@pytest.mark.parametrize("gone", [False, True])
def test_an_accepted_connection_whose_listener_is_outside(gone: bool, zoo: Zoo, trip: Trip) -> None:
    """It bears the listener's name, and is none that is bound: the listener is found as before, or
    its file stays.
    """
    name, noted = str(zoo.home / "a.sock"), zoo.home / "listener"
    animal = zoo.launch(
        "counter.py", prefix=[sys.executable, "-S", "-c", LISTENER, str(noted), name]
    )
    listener = int(wait_until(lambda: noted.exists() and noted.read_text(), 60, "listener"))
    before = inode(name)
    report = trip.dump(animal)
    if gone:
        os.kill(listener, signal.SIGKILL)
        wait_until(lambda: start_time(listener) is None, 60, "the listener has ended")
    restored = trip.restore(report, animal)
    restored.ask()
    assert inode(name) == before
    if not gone:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(name)
            assert client.recv(64) == b"served"
        os.kill(listener, signal.SIGKILL)


def test_a_deleted_name_that_another_process_has(zoo: Zoo, trip: Trip) -> None:
    """Such a socket cannot be found by its name, so it comes with another one."""
    name = str(zoo.home / "a.sock")
    animal = zoo.launch("listening.py", f"deleted:{name}")
    second = zoo.launch("listening.py", f"stream:{name}", name="second")
    before = inode(name)
    restored = trip.restore(trip.dump(animal), animal, ignore=("*/descriptors/*/local",))
    (warning,) = restored.answer["warnings"]
    assert name in warning and f"PID {second.pid} (" in warning
    assert restored.ask()["names"][name] != name and inode(name) == before
    say("second", name)
    assert second.ask()["heard"] == {name: ["second"]}
    assert [path.name for path in zoo.home.glob("a.sock*")] == ["a.sock"]


def test_a_name_as_long_as_can_be(zoo: Zoo, trip: Trip) -> None:
    """Its file is there yet, without a socket; an address has no room for a way to it before it."""
    animal = zoo.launch("listening.py", f"stream:{'s' * 107}")
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        animal.ask()


@pytest.mark.parametrize("there", [True, False])
def test_a_restore_that_fails_leaves_the_path_as_it_was(
    there: bool, zoo: Zoo, trip: Trip, criuctl: Criuctl, home: Home
) -> None:
    """CRIU has bound the socket by then: the file of the one that is gone is there again, or
    nothing.
    """
    name = str(zoo.home / "a.sock")
    animal = zoo.launch("listening.py", f"stream:{name}")
    report = trip.dump(animal)
    if not there:
        os.unlink(name)
    hooks = HookFolder(home.path / "hooks")
    criuctl.extra["CRIUCTL_HOOK_DIRS"] = str(hooks.path)
    guard = hooks.sh("post-restore", "guard", f"[ -S {name} ] && chmod 777 {name}; exit 10")
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 10
    assert os.path.lexists(name) is there
    if there:
        assert (
            stat.S_ISSOCK(os.lstat(name).st_mode) and stat.S_IMODE(os.lstat(name).st_mode) == 0o640
        )
        with pytest.raises(ConnectionRefusedError):
            say("nobody", name)
    guard.unlink()
    trip.restore(report, animal).ask()


def test_it_was_taken_at_the_last_moment(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """While the restore was under way: it fails, and who came meanwhile stays."""
    name = str(zoo.home / "a.sock")
    animal = zoo.launch("listening.py", f"stream:{name}")
    report = trip.dump(animal)
    with paused(criuctl, "restore", "restore", report["checkpoint"]) as held:
        os.unlink(name)
        second = zoo.launch("listening.py", f"stream:{name}", name="second")
        held.go_on()
        held.wait_settled(second)
    assert held.command.process.wait(0) == 6
    assert (
        f"{name} is the name" in held.command.output()
        and f"PID {second.pid} (" in held.command.output()
    )
    say("second", name)
    assert second.ask()["heard"] == {name: ["second"]}

"""Known programs: what `check` says of each as it comes, and that its remedy makes it one that
comes back.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from servers.common import free_ports
from servers.postgresql import PostgresServer, binary, postgresql
from support import oracle
from support.command import Criuctl
from support.keeper import wait_until
from support.zoo import Animal, Zoo

from criuctl.dump.checks.known_programs import FIREFOX

pytestmark = pytest.mark.integration


def need(program: str) -> str:
    """The program's path; a machine without it is not set up for these tests (scripts/setup --dev
    installs them).
    """
    found = shutil.which(program)
    if found is None:
        pytest.fail(f"{program} is not installed; scripts/setup --dev does it")
    return found


def errors_of(criuctl: Criuctl, pid: int) -> list[dict[str, Any]]:
    return [f for f in criuctl("check", pid, check=False)["findings"] if f["level"] == "error"]


def refused(criuctl: Criuctl, animal: Animal, program: str, remedy: str, *, least: int = 1) -> None:
    """Every error has this program's remedy, which is printed once."""

    def found() -> list[dict[str, Any]]:
        found = errors_of(criuctl, animal.pid)
        return found if len(found) >= least else []

    errors = wait_until(found, 60, f"{least} errors of {program}")
    assert {f.get("program") for f in errors} == {program}, errors
    assert all(remedy in f["hint"] for f in errors), errors
    command = criuctl.start("check", animal.pid, json_output=False)
    assert command.process.wait(120) == 4
    shown = command.output()
    assert shown.count(remedy) == 1, shown
    assert len(errors) == 1 or "more like it" in shown, shown


def back(criuctl: Criuctl, zoo: Zoo, animal: Animal) -> Animal:
    """There and back, of a program that never rests, starts processes and so is not compared."""
    assert errors_of(criuctl, animal.pid) == []
    report = criuctl("dump", animal.pid)
    return zoo.adopt(criuctl("restore", report["checkpoint"])["pid"], animal)


def get(url: str, method: str = "GET") -> Any:
    with urlopen(Request(url, method=method), timeout=60) as answer:
        return answer.read()


def answers(url: str) -> bool:
    try:
        get(url)
    except (URLError, OSError):
        return False
    return True


class Marionette:
    """The remote control of Firefox: a session with its first tab, by JSON over TCP."""

    def __init__(self, port: int) -> None:
        self.peer = socket.create_connection(("127.0.0.1", port), timeout=60).makefile("rwb")
        self._read()
        self.ask("WebDriver:NewSession", {})

    def ask(self, command: str, parameters: dict[str, Any]) -> Any:
        body = json.dumps([0, 1, command, parameters]).encode()
        self.peer.write(b"%d:%s" % (len(body), body))
        self.peer.flush()
        _, _, error, result = self._read()
        assert error is None, error
        return result

    def _read(self) -> Any:
        size = b""
        while (byte := self.peer.read(1)) != b":":
            assert byte, "Firefox has closed the connection"
            size += byte
        return json.loads(self.peer.read(int(size)))


def firefox(zoo: Zoo, name: str, env: dict[str, str]) -> tuple[Animal, int]:
    (port,) = free_ports(1)
    profile = zoo.home / f"{name}-profile"
    profile.mkdir()
    (profile / "user.js").write_text(f'user_pref("marionette.port", {port});\n')
    argv = [
        need("firefox-esr"),
        "--headless",
        "--no-remote",
        "--marionette",
        "--profile",
        str(profile),
        "about:blank",
    ]
    return zoo.launch(argv, name=name, quiet=False, env=env), port


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_firefox(zoo: Zoo, criuctl: Criuctl) -> None:
    sandboxed, _ = firefox(zoo, "sandboxed", {})
    refused(criuctl, sandboxed, "Firefox", "MOZ_DISABLE_CONTENT_SANDBOX=1", least=10)
    sandboxed.end()
    animal, port = firefox(zoo, "open", dict.fromkeys(FIREFOX, "1"))
    wait_until(lambda: listens(port), 120, "Firefox listens")
    wait_until(lambda: len(oracle.tree(animal.pid)) > 4, 120, "Firefox has started its processes")
    back(criuctl, zoo, animal)
    control = Marionette(port)
    control.ask("WebDriver:Navigate", {"url": "data:text/html,<title>after</title>"})
    assert control.ask("WebDriver:GetTitle", {}) == {"value": "after"}
    assert control.ask("WebDriver:ExecuteScript", {"script": "return 6 * 7", "args": []}) == {
        "value": 42
    }


def test_chromium(zoo: Zoo, criuctl: Criuctl) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/json"
    flags = ["--headless", "--disable-gpu", f"--remote-debugging-port={port}", "about:blank"]
    program = need("chromium")
    # Root gets no sandbox: it refuses to start with one.
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--pdeathsig", "KILL"]
    place = zoo.home / "nobody"
    place.mkdir()
    os.chown(place, 65534, 65534)
    zoo.home.chmod(0o711)
    env = {"HOME": str(place), "XDG_RUNTIME_DIR": str(place)}
    sandboxed = zoo.launch(
        [*nobody, program, f"--user-data-dir={place}/data", *flags],
        name="sandboxed",
        quiet=False,
        env=env,
    )
    wait_until(lambda: answers(f"{url}/version"), 120, "Chromium answers")
    errors = [f for f in errors_of(criuctl, sandboxed.pid) if f["code"] != "foreign-user"]
    assert len(errors) > 4 and {f.get("program") for f in errors} == {"Chromium"}, errors
    assert all("--no-sandbox" in f["hint"] for f in errors)
    sandboxed.end()
    zoo.home.chmod(0o700)
    animal = zoo.launch(
        [program, "--no-sandbox", f"--user-data-dir={zoo.home}/data", *flags],
        name="open",
        quiet=False,
    )
    wait_until(lambda: answers(f"{url}/version"), 120, "Chromium answers")
    back(criuctl, zoo, animal)
    get(f"{url}/new?data:text/html,<title>after</title>", "PUT")
    wait_until(
        lambda: any(page["title"] == "after" for page in json.loads(get(f"{url}/list"))),
        60,
        "a page is shown",
    )


def bubble(zoo: Zoo, name: str, *options: str) -> Animal:
    script = (
        f"while :; do date +%s%N >{zoo.home}/{name}.new; mv {zoo.home}/{name}.new "
        f"{zoo.home}/{name}; sleep 0.1; done"
    )
    argv = [need("bwrap"), "--bind", "/", "/", "--dev", "/dev", *options, "--", "sh", "-c", script]
    animal = zoo.launch(argv, name=f"bwrap-{name}", quiet=False)
    wait_until((zoo.home / name).exists, 60, "it runs inside")
    return animal


def test_bubblewrap(zoo: Zoo, criuctl: Criuctl) -> None:
    remedy = "--unshare-pid --as-pid-1 --new-session --proc /proc"
    plain = bubble(zoo, "plain", "--unshare-pid", "--proc", "/proc")
    refused(criuctl, plain, "bubblewrap", remedy)
    inner = Animal(oracle.tree(plain.pid)[1], plain.folder, quiet=False)
    # the init that bwrap leaves inside can be dumped no better
    refused(criuctl, inner, "bubblewrap", remedy, least=2)
    plain.end()
    outer = bubble(zoo, "own", *remedy.split())
    animal = zoo.adopt(oracle.tree(outer.pid)[1], outer)
    back(criuctl, zoo, animal)
    ticks(zoo.home / "own")


def ticks(path: Path) -> None:
    """The program goes on writing this file."""
    before = path.read_text()
    wait_until(lambda: path.read_text() not in ("", before), 60, f"{path} is written")


@pytest.mark.parametrize(
    "remedy", [["env", "UV_USE_IO_URING=0"], []], ids=["as-told", "as-it-comes"]
)
def test_node(remedy: Sequence[str], zoo: Zoo, criuctl: Criuctl) -> None:
    path = zoo.home / "tick"
    script = f"""
        const fs = require('fs'); let n = 0;
        setInterval(() => fs.readFile('/etc/hostname', () => {{
            fs.writeFileSync('{path}.new', String(n++));
            fs.renameSync('{path}.new', '{path}'); }}), 50);
    """
    rings = zoo.launch(
        ["env", "UV_USE_IO_URING=1", need("node"), "-e", script], name="rings", quiet=False
    )
    wait_until(path.exists, 60, "Node.js works")
    refused(criuctl, rings, "Node.js", "UV_USE_IO_URING=0")
    rings.end()
    animal = zoo.launch([*remedy, need("node"), "-e", script], name="none", quiet=False)
    ticks(path)
    back(criuctl, zoo, animal)
    ticks(path)


def test_mariadb(zoo: Zoo, criuctl: Criuctl) -> None:
    def launch(name: str, *options: str) -> tuple[Animal, Path]:
        data = zoo.home / f"{name}-data"
        data.mkdir()
        place = [
            f"--datadir={data}",
            f"--tmpdir={data}",
            f"--socket={data}/socket",
            f"--pid-file={data}/pid",
        ]
        argv = [
            need("mariadbd"),
            "--no-defaults",
            "--user=root",
            "--skip-networking",
            "--skip-grant-tables",
            *place,
        ]
        animal = zoo.launch([*argv, *options], name=name, quiet=False)
        wait_until(lambda: b"MariaDB" in greeting(data / "socket"), 60, "MariaDB answers")
        return animal, data / "socket"

    rings, _ = launch("rings")
    refused(criuctl, rings, "MariaDB", "--innodb-use-native-aio=OFF")
    animal, place = launch("none", "--innodb-use-native-aio=OFF")
    back(criuctl, zoo, animal)
    assert b"MariaDB" in greeting(place)


def greeting(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        try:
            client.connect(str(path))
            return client.recv(1000)
        except OSError:
            return b""


def test_postgresql(criuctl: Criuctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses root, and other users' programs are not dumped on every machine of the tests: what
    `check` says, then.
    """

    def errors(server: PostgresServer) -> list[dict[str, Any]]:
        assert server._process is not None
        return [f for f in errors_of(criuctl, server._process.pid) if f["code"] != "foreign-user"]

    with postgresql() as server:
        (found,) = errors(server)
        assert found["program"] == "PostgreSQL" and "PrivateIPC=yes" in found["hint"], found
        monkeypatch.setattr(server, "_as_postgres", ["unshare", "--ipc", *server._as_postgres])
        server.restart()
        assert errors(server) == []


CLIENT = """
export PGHOST={folder} PGPORT={port} PGUSER=trust PGDATABASE=postgres
mkfifo {folder}/commands
LD_PRELOAD={folder}/disguise.so {server} -D {folder}/data -c port={port} \\
    -c listen_addresses= -c unix_socket_directories={folder} &
until psql -c "SELECT 1"; do kill -0 $! && sleep 0.1 || exit; done
exec 3<>{folder}/commands
: >{folder}/answers  # before anybody waits for it to grow
psql -qAtX <&3 >>{folder}/answers &
echo $$ >{folder}/ready
wait
"""


def test_postgresql_and_a_client_in_a_transaction(zoo: Zoo, criuctl: Criuctl) -> None:
    """Both in one tree, in an IPC namespace of its own, as the remedy says.

    The server does not start as root, and not every machine of the tests can dump other users'
    programs: it is root's, and getuid(2) says that it is not.
    """
    folder = zoo.home / "database"
    folder.mkdir()
    zoo.home.chmod(0o711)
    server = PostgresServer(folder)
    server.initialise()
    server.stop()
    source, uid = folder / "disguise.c", pwd.getpwnam("postgres").pw_uid
    source.write_text(
        "".join(f"int {name}(void) {{ return {uid}; }}\n" for name in ("getuid", "geteuid"))
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", folder / "disguise.so", source], check=True, timeout=60
    )
    script = CLIENT.format(folder=folder, port=server.port, server=binary("postgres"))
    replies = folder / "answers"

    def ask(statement: str) -> str:
        before = replies.stat().st_size
        with (folder / "commands").open("w") as commands:
            commands.write(f"{statement}\n")
        wait_until(lambda: replies.stat().st_size > before, 60, f"an answer to {statement}")
        return replies.read_text()[before:].strip()

    animal = zoo.launch(["unshare", "--ipc", "sh", "-c", script], name="database", quiet=False)
    wait_until((folder / "ready").exists, 60, "PostgreSQL and its client")
    assert ask("BEGIN; CREATE TEMP TABLE kept AS SELECT 41 AS n; SELECT n FROM kept;") == "41"
    back(criuctl, zoo, animal)
    assert (
        ask(
            "UPDATE kept SET n = n + 1; CREATE TABLE done AS SELECT n FROM kept; COMMIT; "
            "SELECT n "
            "FROM done;"
        )
        == "42"
    )
    with server.connect(host="unix") as other:
        assert other.execute("SELECT n FROM done").fetchall() == [(42,)]

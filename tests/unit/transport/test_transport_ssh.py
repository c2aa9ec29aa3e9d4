"""criuctl on another host by ssh: the real ssh, with a real server at the end of a pipe."""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers.common import free_ports
from support.linking import TIMEOUT
from support.oracle import read

from criuctl import config as configuration
from criuctl.config import Config
from criuctl.errors import ConfigError, HostUnreachable, LinkLost, PlatformError, UsageError
from criuctl.proc import command
from criuctl.proc.child import Child
from criuctl.session.client.remote import Remote
from criuctl.transport import ssh
from criuctl.transport.ssh import Connection, Host

PROJECT = Path(__file__).parents[3]
PEER = f"PYTHONPATH={PROJECT} {sys.executable} {Path(__file__).with_name('peer.py')}"


def test_hosts_by_address() -> None:
    host = Host.parse("ssh://me@host.example:2222", Config())
    assert (host.name, host.address.words(), host.command) == (
        "me@host.example",
        ["-p", "2222", "--", "me@host.example"],
        "criuctl",
    )
    assert Host.parse("ssh://[fe80::1%eth0]/", Config()).address.words() == ["--", "fe80::1%eth0"]
    for bad in (
        *(
            "",
            "host",
            "me@host",
            "host:22",
            "http://host",
            "ssh://",
            "ssh://host/path",
            "ssh://a b",
            "ssh://host:99999",
            "ssh://host:0",
        ),
        *(
            "ssh://-oProxyCommand=x",
            "ssh://-l@host",
            "ssh://me@-host",
            "ssh://me@host;x",
            "ssh://host\n",
            "ssh://$(x)",
        ),
    ):
        with pytest.raises(UsageError):
            Host.parse(bad, Config())


def test_hosts_by_name(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "hosts:\n  web2: {url: 'ssh://root@10.0.0.2:23', command: sudo criuctl, options: "
        "[ProxyJump=b]}\n  old: {url: 'ssh://x'}\n"
    )
    config = configuration.load(str(file), {})
    host = Host.parse("web2", config)
    assert (host.name, host.command, host.options) == ("web2", "sudo criuctl", ("ProxyJump=b",))
    assert host.address.words() == ["-p", "23", "--", "root@10.0.0.2"]
    with pytest.raises(UsageError) as info:
        Host.parse("web3", config)
    assert "old, web2" in info.value.hint
    for settings in (
        *(
            {},
            {"url": "web2"},
            {"url": "ssh://a/b"},
            {"url": 5},
            {"url": "ssh://a", "port": 5},
            {"url": "ssh://a", "command": ""},
        ),
        *(
            {"url": "ssh://a", "options": "ProxyJump=b"},
            {"url": "ssh://a", "options": ["-v"]},
            {"url": "ssh://a", "options": [5]},
        ),
    ):
        with pytest.raises(ConfigError, match="hosts: h: "):
            Host.parse("h", Config(hosts={"h": settings}))
    with pytest.raises(ConfigError, match="hosts must be a mapping of names"):
        configuration.load(None, {"CRIUCTL_HOSTS": "[web2]"})


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Config]:
    """A configuration with a host ``far``: a real ssh server, started for each connection."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    assert sshd is not None, "openssh-server is missing"
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "user", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
    (tmp_path / "server").write_text(
        f"HostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\nStrictModes no\nUsePAM "
        "no\nPasswordAuthentication no\n"
    )
    (tmp_path / "known").write_text("far.example " + (tmp_path / "host.pub").read_text())

    def make(
        command: str = PEER, *, key: str = "user", known: str = "known", **settings: object
    ) -> Config:
        options = [
            f"UserKnownHostsFile={tmp_path / known}",
            f"ProxyCommand={sshd} -i -f {tmp_path}/server",
            "BatchMode=yes",
        ]
        ssh = shlex.join(
            [
                "ssh",
                "-F",
                "none",
                "-i",
                str(tmp_path / key),
                *(word for option in options for word in ("-o", option)),
            ]
        )
        # whatever user the environment names
        url = f"ssh://{pwd.getpwuid(os.geteuid()).pw_name}@far.example"
        return Config(ssh_command=ssh, hosts={"far": {"url": url, "command": command, **settings}})

    return make


def connect(config: Config) -> Connection:
    return Connection.open(
        Host.parse("far", config), ["receive", "--to", "a 'place'"], config, timeout=TIMEOUT
    )


def test_a_link_over_ssh(configured: Callable[..., Config], no_thread_fails: list[object]) -> None:
    body = os.urandom(1 << 20) * 3
    with connect(configured()) as connection:
        assert connection.link.name == "far"
        assert connection.link.ask("echo", {"a": 1}, body).view == body
        # A terminal's ^C reaches all foreground processes: criuctl still needs its link.
        os.kill(connection._child.pid, signal.SIGINT)
        assert connection.link.ask("echo", {}, body).view == body
    there = connection.link.hello["pid"]
    # empty when it is gone, or about to be reaped
    assert "peer.py" not in read(f"/proc/{there}/cmdline")


def test_a_host_that_dies_under_the_link(configured: Callable[..., Config]) -> None:
    with connect(configured()) as connection:
        hung = threading.Event()

        def hang() -> None:
            with pytest.raises(LinkLost, match="cut"):
                connection.link.ask("hang")
            hung.set()

        threading.Thread(target=hang).start()
        connection.link.ask("echo")
        os.kill(connection.link.hello["pid"], signal.SIGKILL)
        assert hung.wait(TIMEOUT)
        error = connection.why(LinkLost("the link with far was cut"))
        assert isinstance(error, LinkLost) and "far was cut" in error.message


def test_the_cause_of_a_lost_link_is_reported(
    configured: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "_SPEAKS", TIMEOUT)
    last_words = f"sh -c '{PEER}; echo out of memory >&2; exit 9'"

    def lose() -> None:
        with connect(configured(last_words)) as there:
            os.kill(there.link.hello["pid"], signal.SIGKILL)
            there.link.ask("hang")

    with pytest.raises(LinkLost, match=r"the link with far was cut \(.*out of memory\)"):
        lose()


def test_a_lost_link_whose_ssh_lives_is_reported_as_it_is(
    configured: Callable[..., Config],
) -> None:
    lost = LinkLost("nothing was received from far for 20 s")
    with pytest.raises(LinkLost) as info, connect(configured()):
        raise lost
    assert info.value is lost and lost.__cause__ is None


def test_a_link_that_cannot_be_made_leaves_no_ssh(
    configured: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Child] = []
    spawn = command.spawn

    def note(*args: Any, **wishes: Any) -> Child:
        started.append(spawn(*args, **wishes))
        return started[-1]

    def no_link(*_args: object, **_wishes: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(command, "spawn", note)
    monkeypatch.setattr(ssh, "Link", no_link)
    with pytest.raises(OSError, match="Too many open files"):
        connect(configured())
    (child,) = started
    assert child.returncode is not None


FAILURES = {
    "no criuctl": ("no-such-program", {}, "no-such-program: .*not found", "command"),
    "a banner": (
        "echo Welcome to far; false",
        {},
        "far said 'Welcome to far': not criuctl's protocol",
        "bashrc",
    ),
    "an error": (
        "echo 'error: no root' >&2; echo 'hint: Use sudo.' >&2; exit 4;",
        {},
        r"ended \(exit code 4\): error: no root",
        "Use sudo",
    ),
    "a stranger": (
        PEER,
        {"key": "stranger"},
        "cannot be reached by ssh: .*Permission denied",
        "key",
    ),
    "unknown host": (
        PEER,
        {"known": "empty"},
        "cannot be reached by ssh: Host key verification failed",
        "by hand",
    ),
    "bad option": (PEER, {"options": ["NoSuch=1"]}, "Bad configuration option", "does not know"),
}


@pytest.mark.parametrize(
    ("command", "changed", "message", "hint"), FAILURES.values(), ids=FAILURES.keys()
)
def test_why_there_is_no_link(
    configured: Callable[..., Config],
    command: str,
    changed: dict[str, object],
    message: str,
    hint: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").write_text("")
    config = configured(command, **changed)
    with pytest.raises(HostUnreachable, match=message) as info:
        connect(config)
    assert hint in info.value.hint
    assert info.value.exit_code == 7


def test_an_address_where_nothing_listens() -> None:
    (port,) = free_ports(1)
    config = Config(
        hosts={"far": {"url": f"ssh://127.0.0.1:{port}"}},
        ssh_command="ssh -F none -o BatchMode=yes",
    )
    with pytest.raises(HostUnreachable, match="Connection refused") as info:
        connect(config)
    assert "port" in info.value.hint


def test_without_ssh() -> None:
    for program in ("no-such-ssh -v", ""):
        with pytest.raises(PlatformError):
            connect(Config(ssh_command=program, hosts={"far": {"url": "ssh://far"}}))
    with pytest.raises(ConfigError):
        connect(Config(ssh_command="'", hosts={"far": {"url": "ssh://far"}}))
    with pytest.raises(ConfigError):
        Remote.parse("ssh://far/work", Config(ssh_command="'"))

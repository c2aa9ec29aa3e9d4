"""Another host, reached by the system's ssh, and a criuctl started there.

ssh handles keys, agents, jump hosts, known hosts and the user's ``~/.ssh/config``. criuctl adds
what a program that carries bytes needs: no terminal there, no forwardings, no compression (the data
is compressed), keep-alive packets, and no shared connection on which other programs would come to
depend. Where there is a terminal here, ssh may ask its user; else it fails at once.

ssh ignores the signals that a terminal sends: criuctl handles an interrupt, and needs the link for
that.

A host is written ``ssh://[USER@]HOST[:PORT]`` or is a name under ``hosts`` in the configuration::

    hosts:
      web2:
        url: ssh://root@web2.example.com
        command: sudo criuctl       # how criuctl is called there; a shell there reads it
        options: [ProxyJump=bastion]  # of ssh_config(5)
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct
from msgspec.structs import replace

from ..errors import (
    ConfigError,
    CriuctlError,
    HostUnreachable,
    LinkLost,
    PlatformError,
    TimedOut,
    UsageError,
)
from ..proc import command
from ..proc.child import Child
from .link import Handler, Link

if TYPE_CHECKING:
    from ..config import Config

_URL = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9._+\\][A-Za-z0-9._+\\-]*)@)?"
    r"(?P<host>\[[0-9A-Za-z:.%_-]+\]|[A-Za-z0-9._][A-Za-z0-9._-]*)(?::(?P<port>\d{1,5}))?(?:/(?P<path>.*))?"
)
_OPTION = re.compile(r"[A-Za-z0-9]+[ =].+")
_AGENT = (
    "SSH_AUTH_SOCK",
    "SSH_AGENT_PID",
    "SSH_ASKPASS",
    "SSH_ASKPASS_REQUIRE",
    "DISPLAY",
    "XAUTHORITY",
    "KRB5CCNAME",
)
_CONNECT = 15  # seconds for one attempt to connect
_ASKING = 120.0  # seconds for a user to type a password
_ENDS = 3.0  # seconds that ssh, and criuctl there, may take to end once the link is closed
_SPEAKS = 1.0  # seconds for ssh to report why the link broke
_OPTIONS = (
    *(
        f"ConnectTimeout={_CONNECT}",
        "ServerAliveInterval=10",
        "ServerAliveCountMax=3",
        "TCPKeepAlive=yes",
        "Compression=no",
    ),
    *(
        "ControlMaster=no",
        "ClearAllForwardings=yes",
        "ForwardAgent=no",
        "ForwardX11=no",
        "PermitLocalCommand=no",
    ),
    *("RemoteCommand=none", "StdinNull=no", "ForkAfterAuthentication=no"),
)
_HINTS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "Its key is not the one known here: if that is right, `ssh-keygen -R` it, then ssh by "
        "hand.",
    ),
    (
        "Host key verification failed",
        "Its key is not known here: connect once by hand with ssh, and look at the key.",
    ),
    (
        "Permission denied",
        "Check `ssh -o BatchMode=yes`. Give it a key or an agent; without a terminal it "
        "cannot ask for a password.",
    ),
    ("Connection refused", "No ssh server listens there: is it the right port?"),
    (
        "Could not resolve hostname",
        "No such name: is it spelt right, or an alias of another user's ~/.ssh/config?",
    ),
    ("timed out", "Nothing answers there: is the host up, and a firewall between?"),
    ("No route to host", "Is the host up, and the network?"),
    ("Network is unreachable", "Is the network up?"),
    (
        "a terminal is required",
        "sudo wants a password there: allow criuctl without one (NOPASSWD), or log in as root.",
    ),
    (
        "a password is required",
        "sudo wants a password there: allow criuctl without one (NOPASSWD), or log in as root.",
    ),
    (
        "Bad configuration option",
        "The options of this host in criuctl's configuration, or ~/.ssh/config, have one that "
        "ssh does not know.",
    ),
)


class Address(Struct, frozen=True):
    """The address that ssh connects to."""

    destination: str  # [USER@]HOST
    port: str  # "" leaves it to ssh
    path: str  # the part after the host, without its slash

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse ``ssh://[USER@]HOST[:PORT][/PATH]``; `UsageError`."""
        match = _URL.fullmatch(url)
        if match is None or not 0 < int(match["port"] or 22) < 65536:
            raise UsageError(f"{url!r} is not a host's address", hint="Like ssh://user@host:22.")
        user = f"{match['user']}@" if match["user"] else ""
        return cls(user + match["host"].strip("[]"), match["port"] or "", match["path"] or "")

    def words(self) -> list[str]:
        """Return the last of ssh's arguments before the command."""
        return [*(["-p", self.port] if self.port else []), "--", self.destination]


class Host(Struct, frozen=True):
    """Another host, as the user or the configuration names it."""

    name: str
    address: Address
    command: str = "criuctl"
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, config: Config) -> Host:
        """Parse an address, or a name in the configuration; `UsageError`, `ConfigError`."""
        if (settings := config.hosts.get(text)) is not None:
            return cls._configured(text, settings)
        if "://" not in text:
            known = ", ".join(sorted(config.hosts)) or "none"
            raise UsageError(
                f"no host {text!r} in the configuration",
                hint=f"Known there: {known}. Or write ssh://user@host.",
            )
        address = Address.parse(text)
        if address.path:
            raise UsageError(
                f"{text!r} has a path, but a host has none", hint="Like ssh://user@host:22."
            )
        return cls(address.destination, address)

    @classmethod
    def _configured(cls, name: str, settings: Mapping[str, Any]) -> Host:
        where = f"hosts: {name}"
        if unknown := set(settings) - {"url", "command", "options"}:
            raise ConfigError(
                f"{where}: unknown key {min(map(str, unknown))!r}",
                hint="Known: url, command, options.",
            )
        url, program, options = (
            settings.get("url"),
            settings.get("command", "criuctl"),
            settings.get("options", []),
        )
        if not isinstance(url, str):
            raise ConfigError(f"{where}: url is missing", hint="Like ssh://user@host:22.")
        try:
            address = Address.parse(url)
        except UsageError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
        if address.path:
            raise ConfigError(f"{where}: {url!r} has a path, but a host has none")
        if not isinstance(program, str) or not program.strip():
            raise ConfigError(f"{where}: command must be text")
        if not isinstance(options, list) or not all(
            isinstance(o, str) and _OPTION.fullmatch(o) for o in options
        ):
            raise ConfigError(f"{where}: options must be a list of Name=value, as in ssh_config(5)")
        return cls(name, address, program, tuple(options))


def environment() -> dict[str, str]:
    """Return what ssh gets of our environment, beyond what every child gets."""
    return {key: os.environ[key] for key in _AGENT if key in os.environ}


def program(config: Config) -> list[str]:
    """Return the ssh program and its options; `ConfigError`, `PlatformError`."""
    try:
        words = shlex.split(config.ssh_command)
    except ValueError as error:
        raise ConfigError(f"ssh_command cannot be read: {error}") from None
    if not words or shutil.which(words[0], path=command.environment()["PATH"]) is None:
        raise PlatformError(
            f"{config.ssh_command or 'ssh'}: no such program",
            hint="Install openssh-client, or set ssh_command.",
        )
    return words


def connect(host: Host, argv: Sequence[str], config: Config) -> tuple[Child, int, int]:
    """Start ``criuctl argv...`` there: return ssh, and the descriptors to read from and write to.

    Returns before ssh is connected. Raises `PlatformError` without an ssh, `CommandFailed` if it
    cannot be started.
    """
    # ssh uses the first value of each option
    wanted = [*host.options, *_OPTIONS, f"BatchMode={'no' if _may_ask() else 'yes'}"]
    words = [
        *program(config),
        "-T",
        *(word for option in wanted for word in ("-o", option)),
        *host.address.words(),
    ]
    # ssh keeps ignoring what is ignored when it starts.
    words = ["env", "--ignore-signal=INT", "--ignore-signal=QUIT", "--ignore-signal=HUP", *words]
    (reading, theirs_out), (theirs_in, writing) = os.pipe(), os.pipe()
    try:
        child = command.spawn(
            [*words, f"{host.command} {shlex.join(argv)}"],
            stdin=theirs_in,
            stdout=theirs_out,
            env=environment(),
        )
    except BaseException:
        os.close(reading)
        os.close(writing)
        raise
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    return child, reading, writing


class Connection:
    """A link with a criuctl on another host, and the ssh that carries it."""

    def __init__(self, host: Host, child: Child, link: Link) -> None:
        self.host = host
        self.link = link
        self._child = child

    @classmethod
    def open(
        cls,
        host: Host,
        argv: Sequence[str],
        config: Config,
        serve: Handler | None = None,
        *,
        timeout: float = 30.0,
        facts: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> Connection:
        """Start ``criuctl argv...`` on `host` and exchange hellos.

        `HostUnreachable` says why that failed; `UnsupportedFormat`.
        """
        patience = _CONNECT + timeout + (_ASKING if _may_ask() else 0)
        child, reading, writing = connect(host, argv, config)
        try:
            link = Link(
                reading,
                writing,
                serve,
                timeout=timeout,
                patience=patience,
                name=host.name,
                facts=facts,
                debug=debug,
            )
        except BaseException:
            os.close(reading)
            os.close(writing)
            child.end()
            child.close()
            raise
        connection = cls(host, child, link)
        try:
            link.start()
            _ = link.hello
        except BaseException as error:
            link.close(0)
            cause = connection._no_hello(error) if isinstance(error, CriuctlError) else error
            connection.close()
            if cause is error:
                raise
            raise cause from error
        return connection

    def why(self, error: CriuctlError) -> CriuctlError:
        """Return why the link was lost: `error`, with ssh's last message."""
        if not isinstance(error, LinkLost):
            return error
        code, last, hint = self._last_output()
        if code is None or not last:  # while ssh runs, its last line may be a greeting
            return error
        return LinkLost(f"{error.message} ({last})", hint=hint or error.hint)

    def _no_hello(self, error: CriuctlError) -> CriuctlError:
        """Return why no hello arrived."""
        if not isinstance(error, LinkLost):
            return error
        code, last, hint = self._last_output()
        name, why = self.host.name, last or error.message
        if code == 127:
            return HostUnreachable(
                f"criuctl cannot be started on {name}: {why}",
                hint=(
                    "Install criuctl there, on the PATH of commands over ssh; or configure its "
                    "path: hosts: NAME: command."
                ),
            )
        if code == 255:
            return HostUnreachable(f"{name} cannot be reached by ssh: {why}", hint=hint)
        if code:
            how = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
            return HostUnreachable(f"criuctl on {name} ended ({how}): {why}", hint=hint)
        return HostUnreachable(f"criuctl on {name} did not answer: {why}", hint=hint or error.hint)

    def _last_output(self) -> tuple[int | None, str, str]:
        return last_output(self._child)

    def close(self, grace: float = 2.0, reason: str = "it is done") -> None:
        """End the link, then ssh."""
        lost = self.link.lost.is_set()
        self.link.close(grace, reason)
        try:
            self._child.wait(0 if lost else _ENDS)  # without a link, ssh has nothing to wait for
        except TimedOut:
            self._child.end()
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cause = self.why(error) if isinstance(error, LinkLost) else error
        self.close()
        if cause is not None and cause is not error:
            raise cause from error


def last_output(child: Child, *, trusted: bool = True) -> tuple[int | None, str, str]:
    """Return ssh's exit code, if it has ended, the last line of it or of criuctl there, and a
    hint; that is criuctl's there only if the host is `trusted`.
    """
    with suppress(TimedOut):
        child.wait(_SPEAKS)
    said = _clean(child.stderr_tail())
    # of criuctl there
    theirs = [line.removeprefix("hint: ") for line in said if line.startswith("hint: ")]
    last = next((line for line in reversed(said) if not line.startswith("hint: ")), "")
    hint = next(
        (hint for text, hint in _HINTS if any(text in line for line in said)),
        theirs[-1] if theirs and trusted else "",
    )
    return child.returncode, last, hint


def unattended(host: Host) -> Host:
    """Return the host as a server reaches it: ssh asks for nothing, and forwards nothing."""
    return replace(host, options=("BatchMode=yes", *host.options, *_OPTIONS))


def _may_ask() -> bool:
    """Return whether ssh can ask a user for a password."""
    if "SSH_ASKPASS" in os.environ:
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _clean(text: str) -> list[str]:
    """Return the lines that matter."""
    lines = ("".join(c for c in line if c.isprintable()).strip() for line in text.splitlines())
    return [
        line[:300] for line in lines if line and not line.startswith("Warning: Permanently added")
    ]

"""Secrets by reference: a rule names the place of a secret, never the secret itself.

    secret: {env: PGPASSWORD}               # of criuctl's own environment
    secret: {file: /etc/criuctl/db.secret}  # its first line; mode 0600 or stricter, owned by
                                            # root or criuctl's user
    secret: {command: [pass, show, db]}     # prints it; gets an allow-listed environment

They are read when they are needed, at the restore again, so a changed credential is used at once.
Many connections with one rule ask at the same time: the output of a command serves all of them for
some seconds. No value read here goes into an error text: neither the content of a file nor the
output of a command.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, CriuctlError, TimedOut
from ..proc import command
from ..quoting import quoted

_LARGEST = 64 * 1024
_FRESH = 5.0  # seconds for which a command is not run again
_asking = threading.Lock()
_printed: dict[tuple[str, ...], tuple[float, str]] = {}
_KINDS = ("env", "file", "command")


class SecretUnavailable(CriuctlError):
    """A secret that a rule refers to cannot be read."""

    code = "secret-unavailable"


def check(reference: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` unless `reference` is {} or has one known kind with a value of
    its type.
    """
    if not reference:
        return
    if len(reference) != 1 or next(iter(reference)) not in _KINDS:
        raise ConfigError(
            f"{where}: a secret is a reference with exactly one of the keys {', '.join(_KINDS)}",
            hint="Secrets themselves are never written into the configuration.",
        )
    kind, value = next(iter(reference.items()))
    words = (
        isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value)
    )
    if not (words if kind == "command" else isinstance(value, str) and value):
        raise ConfigError(
            f"{where}: {kind} must be {'a list of words' if kind == 'command' else 'text'}"
        )


def resolve(
    reference: Mapping[str, Any], *, timeout: float = 10.0, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return the secret, or None for an empty reference; `SecretUnavailable` says which reference
    failed and why.
    """
    if not reference:
        return None
    check(reference, "secret")
    kind, value = next(iter(reference.items()))
    if kind == "env":
        if value not in environ:
            raise SecretUnavailable(
                f"the environment variable {value} is not set",
                hint=f"Run criuctl with {value} set.",
            )
        return _text(os.fsencode(environ[value]), f"the environment variable {value}")
    return _of_file(value) if kind == "file" else _of_command(tuple(value), timeout)


def _of_file(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SecretUnavailable(
            f"the secret file {path} cannot be opened: {error.strerror}"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SecretUnavailable(f"the secret file {path} is not a regular file")
        if status.st_mode & 0o077:
            raise SecretUnavailable(
                f"the secret file {path} may be read by others (mode "
                f"{stat.S_IMODE(status.st_mode):04o})",
                hint=f"chmod 0600 {quoted(path)}",
            )
        if status.st_uid not in (0, os.geteuid()):
            raise SecretUnavailable(
                f"the secret file {path} belongs to uid {status.st_uid}, neither to us nor to root"
            )
        return _first_line(os.read(descriptor, _LARGEST), f"the secret file {path}")
    finally:
        os.close(descriptor)


def _of_command(argv: tuple[str, ...], timeout: float) -> str:
    with _asking:
        known = _printed.get(argv)
        if known is None or time.monotonic() - known[0] > _FRESH:
            known = _printed[argv] = (time.monotonic(), _run(argv, timeout))
        return known[1]


def _run(argv: tuple[str, ...], timeout: float) -> str:
    name = argv[0]  # its arguments may be secret
    try:
        done = command.run(argv, timeout=max(timeout, 0.1), check=False)
    except TimedOut:
        raise SecretUnavailable(f"the secret command {name} was not done in time") from None
    except CriuctlError as error:
        if error.code == "platform":
            raise SecretUnavailable(f"the secret command {name} does not exist") from None
        raise SecretUnavailable(f"the secret command {name} cannot be run") from None
    if done.returncode:
        raise SecretUnavailable(f"the secret command {name} failed (exit code {done.returncode})")
    return _first_line(done.stdout, f"the secret command {name}")


def _first_line(data: bytes, what: str) -> str:
    line = _text(data.split(b"\n", 1)[0].rstrip(b"\r"), what)
    if not line:
        raise SecretUnavailable(f"{what} holds nothing in its first line")
    return line


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SecretUnavailable(f"{what} does not hold UTF-8 text") from None

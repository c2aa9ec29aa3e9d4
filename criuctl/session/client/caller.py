"""Which operator a command line is: its kind and its name; or on whose behalf a thread works.

A command is a `human`'s when it is run from a terminal, and a `service`'s otherwise: a script of
cron, a unit, a program's child without a terminal.  ``CRIUCTL_KIND`` says what else it is: an agent
sets ``agent`` for its commands, and a person whose command has no terminal sets ``human``.  The
name is that of ``CRIUCTL_OPERATOR``, or the user's.  ``CRIUCTL_ROLE`` is the most that it may do; a
server sets it for the commands that it runs for a client.

Servers and the Python API work for others (`acting`; see `criuctl.ops.acting`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from ...errors import UsageError
from ..protocol import KINDS, ROLES
from ..roles import lower

KIND, NAME, ROLE = "CRIUCTL_KIND", "CRIUCTL_OPERATOR", "CRIUCTL_ROLE"


class Operator(Protocol):
    """On whose behalf something is done."""

    @property
    def kind(self) -> str:
        """Human, agent or service."""

    @property
    def name(self) -> str:
        """The name of its operators; an empty one is the user's."""

    def capped(self, role: str) -> str:
        """Return `role`, or the actor's if that is lower."""


_current: ContextVar[Operator | None] = ContextVar("criuctl.acting", default=None)


def current() -> Operator | None:
    """Return on whose behalf this thread works; None: of the user of the command line."""
    return _current.get()


@contextmanager
def acting(operator: Operator) -> Iterator[None]:
    """Work on behalf of `operator`, in this thread, inside a ``with``."""
    before = _current.set(operator)
    try:
        yield
    finally:
        _current.reset(before)


def identity() -> tuple[str, str]:
    """Return kind and name of the operator that asks: that of the thread, or the command line's."""
    known = current()
    return (known.kind, known.name or name()) if known is not None else (kind(), name())


def capped(role: str) -> str:
    """Return `role`, or the most that the operator that asks may do anywhere, if that is lower."""
    known = current()
    return known.capped(role) if known is not None else lower(role, _most())


def variables(operator: Operator) -> dict[str, str]:
    """Return the variables by which a command runs on behalf of `operator`."""
    return {KIND: operator.kind, NAME: operator.name or name(), ROLE: operator.capped("admin")}


def _most() -> str:
    role = os.environ.get(ROLE) or "admin"
    if role not in ROLES:
        raise UsageError(f"{ROLE}={role!r} is no role", hint=f"One of {', '.join(ROLES)}.")
    return role


def kind() -> str:
    """Return the kind of operator that this process is; `UsageError` for an unknown one."""
    said = os.environ.get(KIND)
    if said:
        if said not in KINDS:
            raise UsageError(f"{KIND}={said!r} is no kind", hint=f"One of {', '.join(KINDS)}.")
        return said
    # A person may redirect the input or the output, but hardly both and the errors.
    return "human" if any(os.isatty(fd) for fd in (0, 1, 2)) else "service"


def name() -> str:
    """Return the name of the operator that this process is."""
    for variable in (NAME, "SUDO_USER", "LOGNAME", "USER"):
        if os.environ.get(variable):
            return os.environ[variable][:64]
    return f"uid-{os.getuid()}"

"""Which operator a command line is: its kind and its name.

A command is a `human`'s when it is run from a terminal, and a `service`'s otherwise: a script of
cron, a unit, a program's child without a terminal.  ``CRIUCTL_KIND`` says what else it is: an agent
sets ``agent`` for its commands, and a person whose command has no terminal sets ``human``.  The
name is that of ``CRIUCTL_OPERATOR``, or the user's.
"""

from __future__ import annotations

import os

from ...errors import UsageError
from ..protocol import KINDS

KIND, NAME = "CRIUCTL_KIND", "CRIUCTL_OPERATOR"


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

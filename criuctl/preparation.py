"""How a host gets what criuctl needs next to its Python package: CRIU, pycriu, a few programs.

On Debian the program `prepare` does it, whose steps are those of scripts/setup; `criuctl doctor
--fix` runs it. On other systems the operator does, with the command that the list `distributions`
has for them. Messages about a missing CRIU get their hint from here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from .quoting import quoted

OS_RELEASE = "CRIUCTL_OS_RELEASE"  # the variable is for the tests
PREFIX = Path("/opt/criuctl")


def folder() -> Path:
    """Return the folder of `prepare` and of its parts: inside the installed package, or in the
    checkout.
    """
    installed = Path(__file__).parent / "shipped"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "scripts"


def prefix() -> Path:
    """Return the folder in which `prepare` is to put CRIU: that of this installation if it has one,
    otherwise `PREFIX`, where every criuctl of this host finds it.
    """
    own = Path(sys.prefix).parent
    return own if (own / "criu.json").is_file() else PREFIX


def system(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the fields of this system's os-release; none if it has no such file."""
    try:
        text = Path(environ.get(OS_RELEASE, "/etc/os-release")).read_text(errors="replace")
    except OSError:
        return {}
    return {
        key: value.strip().strip("\"'")
        for key, _equals, value in (line.partition("=") for line in text.splitlines())
        if key.isidentifier()
    }


def on_debian(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `prepare` may be able to prepare this system."""
    return system(environ).get("ID") == "debian"


def advice(environ: Mapping[str, str] = os.environ) -> str:
    """Return how to get a CRIU that works on this system: one or two sentences with a command."""
    if on_debian(environ):
        return f"{fixing()} finds or installs one that works on this kernel."
    return (
        f"Install it by hand: {by_hand(environ)}. It must be 4.2 or newer, and its Python "
        "package pycriu importable for criuctl (`criuctl doctor` reports what is missing)."
    )


def by_hand(environ: Mapping[str, str] = os.environ) -> str:
    """Return the command for this system, or what is needed, by the list `distributions`."""
    found = system(environ)
    listed = re.findall(r"(?m)^(\w+) +(.+)$", (folder() / "lib/distributions").read_text())
    commands: dict[str, str] = dict(listed)
    names = [found.get("ID", ""), *found.get("ID_LIKE", "").split(), "any"]
    return next(commands[name] for name in names if name in commands)


def fixing(*more: str) -> str:
    """Return the command that prepares this host, as root, between backquotes: quoted words that
    can be pasted.
    """
    own = Path(sys.argv[0])
    if own.name != "criuctl":
        words = [sys.executable, "-m", "criuctl"]
    elif os.geteuid() == 0 and shutil.which("criuctl") == str(own):
        words = ["criuctl"]
    else:
        words = [str(own.absolute())]  # root's PATH may be another one
    as_root = [] if os.geteuid() == 0 else ["sudo"]
    return "`" + " ".join(map(quoted, [*as_root, *words, "doctor", "--fix", *more])) + "`"

"""Preparing this host for criuctl: `criuctl doctor --fix`.

The steps are those of scripts/setup, in a program that ships with the package (`preparation`):
Debian packages that are missing, a CRIU that works on this kernel, and pycriu for the interpreter
that runs criuctl. A second run changes nothing.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig

from .. import preparation
from ..errors import PlatformError
from ..proc import command
from ..quoting import printable, quoted

# what apt-get and the program itself read; a child sees nothing else of criuctl's environment
_PASSED = ("http_proxy", "https_proxy", "no_proxy", "CRIUCTL_CRIU", preparation.OS_RELEASE)


def plan() -> list[str]:
    """Return the steps, one sentence each; raise `PlatformError` where they cannot be taken."""
    if os.geteuid() != 0:
        raise PlatformError("preparing this host needs root", hint=f"Run {preparation.fixing()}.")
    if not preparation.on_debian():
        name = printable(preparation.system().get("PRETTY_NAME", "a system without a name"))
        raise PlatformError(
            f"Debian 12 and 13 can be prepared, and this is {name}", hint=preparation.advice()
        )
    prefix = preparation.prefix()
    return [
        "Install the Debian packages nftables, iproute2 and tini, if they are missing.",
        "Find a CRIU that works on this kernel, by a trial dump, or install a newer one into "
        f"{prefix / 'criu'}; other programs of this host do not see it.",
        f"Make CRIU's Python package importable for {sys.executable}.",
    ]


def prepare() -> None:
    """Take the steps; what is done is reported on standard error. Raise `PlatformError` if it
    fails: what was done until then stays, and a new call continues.
    """
    program = preparation.folder() / "prepare"
    argv = ["sh", str(program), "--prefix", str(preparation.prefix()), "--python", sys.executable]
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    with command.spawn(argv, stdout=2, stderr=2, env=passed) as child:
        code = child.wait()
    if code:
        raise PlatformError(
            f"this host is not prepared: {quoted(program)} ended with {code}",
            hint="The lines above have the reason. A new `criuctl doctor --fix` continues.",
        )
    # pycriu has become importable for this process, too
    site.addsitedir(sysconfig.get_path("purelib"))
    importlib.invalidate_caches()

"""What a restored tree may know of itself: one file per living tree, which `criuctl.inside` finds.

It exists before the tree runs, and is removed when the tree is found to be gone.  Every user can
read it, so it contains nothing private: the connections' outcomes, without the details of their
protocols.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import now
from ..config import Config
from ..proc.namespaces import namespaces, ns_pids
from ..proc.ownership import check_own
from ..proc.tree import ProcessIdentity
from ..report import Reporter

_DEFAULT = "/run/criuctl"


def _folder(config: Config) -> Path:
    return Path(config.run_dir or _DEFAULT) / "inside"


def publish(
    config: Config,
    root: int,
    identity: Mapping[str, Any],
    connections: Sequence[Mapping[str, Any]],
    reporter: Reporter,
) -> None:
    """Write the report for the tree of `root` (its PID on this host); the tree works without it."""
    try:
        _publish(config, root, identity, connections)
    except OSError as error:
        reporter.warning(
            f"the report for the tree itself could not be left in {_folder(config)}: "
            f"{error.strerror}"
        )


def _publish(
    config: Config, root: int, identity: Mapping[str, Any], connections: Sequence[Mapping[str, Any]]
) -> None:
    sweep(config)
    folder = _folder(config)
    for each in (folder.parent, folder):
        try:
            each.mkdir(parents=True)
        except FileExistsError:  # another restore may be making it at this moment
            continue
        each.chmod(0o755)  # independent of the umask
    check_own(folder)
    process = ProcessIdentity.of(root)
    body = {
        **identity,
        "restored": now(),
        "pid": ns_pids(root)[-1],
        "host_pid": root,
        "start_time": process.start_time,
        "time_namespace": namespaces("self").get("time"),
        "connections": [
            {key: value for key, value in c.items() if key != "details"} for c in connections
        ],
    }
    path = folder / f"{namespaces(root)['pid']}-{ns_pids(root)[-1]}.json"
    temporary = folder / f".{path.name}.{os.getpid()}"
    try:
        fd = os.open(
            temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        with open(fd, "w") as file:
            os.fchmod(fd, 0o644)
            json.dump(body, file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(config: Config) -> None:
    """Remove the reports of trees that are gone.  `OSError`: the folder cannot be written; they do
    no harm.
    """
    check_own(_folder(config))
    for path in _folder(config).glob("*.json"):
        try:
            report = json.loads(path.read_text())
            gone = not ProcessIdentity(int(report["host_pid"]), int(report["start_time"])).alive()
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            gone = True
        if gone:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

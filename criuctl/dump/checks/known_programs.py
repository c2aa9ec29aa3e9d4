"""Known programs and what they need to be dumped: a specific hint instead of the general one.

The checks describe an obstacle in the kernel's terms.  Why a program has such a thing, and which of
its options avoids it, is particular to the program, and is in this table.  Each row that offers
a way was tried with the program (tests/integration/test_known_programs.py): with the hint, `check`
finds no error any more, and the program goes on after a dump and a restore.  Programs that can be
dumped as they come have no row (Redis, nginx, a JVM).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ...errors import CriuctlError
from ...proc.procfs import read_link
from ...report import Finding
from .scene import Scene

_SANDBOX = frozenset({"nested-namespace", "path-hidden", "mount-namespace"})
_BWRAP = (
    "Start it as `bwrap --unshare-pid --as-pid-1 --new-session --proc /proc ...`, and dump the "
    "program that it starts (the child of bwrap), not bwrap."
)
_NO_SANDBOX = (
    "keeps its processes in namespaces of their own. Start it without, for pages that you trust:"
)


class KnownProgram(Struct, frozen=True):
    """The hint for a program, known by its executable's name, for errors of some codes."""

    name: str
    executables: frozenset[str]
    codes: frozenset[str]
    hint: str
    starts: bool = False  # also for errors of the processes that it starts


FIREFOX = (
    "MOZ_DISABLE_CONTENT_SANDBOX", "MOZ_DISABLE_GMP_SANDBOX", "MOZ_DISABLE_GPU_SANDBOX",
    "MOZ_DISABLE_RDD_SANDBOX", "MOZ_DISABLE_SOCKET_PROCESS_SANDBOX", "MOZ_DISABLE_UTILITY_SANDBOX",
)  # fmt: skip
"""The variables that turn the sandboxes of Firefox off."""

KNOWN_PROGRAMS = (
    KnownProgram(
        "Firefox",
        frozenset({"firefox", "firefox-esr", "firefox-bin"}),
        _SANDBOX,
        f"Firefox {_NO_SANDBOX} `env {' '.join(f'{name}=1' for name in FIREFOX)} firefox ...`.",
    ),
    KnownProgram(
        "Chromium",
        frozenset({"chromium", "chrome"}),
        _SANDBOX,
        f"Chromium {_NO_SANDBOX} `chromium --no-sandbox ...`.",
    ),
    KnownProgram(
        "bubblewrap",
        frozenset({"bwrap"}),
        frozenset({"nested-namespace", "mount-namespace"}),
        _BWRAP,
    ),
    KnownProgram(
        "bubblewrap",
        frozenset({"bwrap"}),
        frozenset({"session-outside-pid-namespace", "proc-mount"}),
        _BWRAP,
        starts=True,
    ),
    KnownProgram(
        "conmon",
        frozenset({"conmon"}),
        frozenset({"nested-namespace", "mount-namespace"}),
        "conmon holds a container of podman or CRI-O: criuctl cannot dump that, and what is inside "
        "neither. As root, `podman container checkpoint` can; for a rootless one there is no way.",
    ),
    KnownProgram(
        "firejail",
        frozenset({"firejail"}),
        _SANDBOX | {"session-outside-pid-namespace", "proc-mount"},
        "No way is known to dump what firejail confines. Start the program without firejail, or "
        "under bubblewrap: `bwrap --unshare-pid --as-pid-1 --new-session --proc /proc ...`.",
        starts=True,
    ),
    KnownProgram(
        "Node.js",
        frozenset({"node", "nodejs"}),
        frozenset({"io-uring"}),
        "Start Node.js with UV_USE_IO_URING=0 in its environment, or, whatever its version, by "
        "`criuctl run --no-io-uring`.",
    ),
    KnownProgram(
        "MariaDB",
        frozenset({"mariadbd", "mysqld"}),
        frozenset({"io-uring"}),
        "Start MariaDB with `--innodb-use-native-aio=OFF` (in its configuration, below [mariadbd]: "
        "innodb_use_native_aio = OFF), or by `criuctl run --no-io-uring`.",
    ),
    KnownProgram(
        "PostgreSQL",
        frozenset({"postgres"}),
        frozenset({"sysv-shm"}),
        "Start PostgreSQL in an IPC namespace of its own: by `criuctl run`, by `unshare --ipc`, "
        "or, as a unit, with PrivateIPC=yes.",
    ),
)


def remedied(findings: Iterable[Finding], lines: Mapping[int, Sequence[str]]) -> list[Finding]:
    """Return the findings, each error of a known program with that program's hint.

    `lines`: for each PID the executable files of the process and of its ancestors, the nearest
    first.
    """
    return [
        _remedied(f, lines.get(f.pid, ())) if f.level == "error" and f.pid is not None else f
        for f in findings
    ]


def _remedied(finding: Finding, line: Sequence[str]) -> Finding:
    names = [os.path.basename(path) for path in line]
    for known in KNOWN_PROGRAMS:
        if finding.code in known.codes and not known.executables.isdisjoint(
            names if known.starts else names[:1]
        ):
            return replace(finding, hint=known.hint, program=known.name)
    return finding


def executables(scene: Scene, findings: Iterable[Finding]) -> dict[int, list[str]]:
    """Return the `lines` for `remedied`, for the processes that have errors.

    They include the process that started the root.
    """
    outside = ""
    with suppress(CriuctlError, OSError):  # it has ended, or may not be looked at
        outside = read_link(scene.root.ppid, "exe") if scene.root.ppid else ""
    lines: dict[int, list[str]] = {}
    for pid in {f.pid for f in findings if f.level == "error" and f.pid in scene.by_pid}:
        assert pid is not None
        line: list[str] = []
        at = scene.by_pid.get(pid)
        while at is not None and len(line) <= len(scene.tree):
            line.append(at.exe)
            at = scene.by_pid.get(at.ppid) if at.pid != scene.root.pid else None
        lines[pid] = [*line, outside]
    return lines

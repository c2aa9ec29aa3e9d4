"""systemd as PID 1 of a few namespaces: what criuctl does where systemd runs, on a host where it
does not.

It is the distribution's systemd with none of its units: a handful of empty targets, a control group
hierarchy of version 2 that it takes for the whole of it, and tmpfs where it writes.  Everything of
it ends with the namespaces' first process.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .command import Home
from .keeper import Keeper, Launched, wait_until

SYSTEMD = Path("/usr/lib/systemd/systemd")
TARGETS = ("sysinit", "basic", "shutdown", "umount", "final", "multi-user")
_BOOT = """
set -e
for folder in /run /etc/systemd; do mount -t tmpfs tmpfs $folder; done
mount -t proc proc /proc
umount -R {roots}
mkdir -p {groups}
mount -t cgroup2 cgroup2 {groups}
export container=test SYSTEMD_UNIT_PATH={units}
exec {systemd} --system --unit=multi-user.target --log-target=console --show-status=0
"""
_TIMEOUT = 120.0


def hierarchy() -> Path | None:
    """Where control groups of version 2 are mounted."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return next(
        (Path(fields[4]) for fields in lines if fields[fields.index("-") + 1] == "cgroup2"), None
    )


class Booted:
    """A running systemd; `prefix` runs a program under it."""

    def __init__(self, keeper: Keeper, home: Home) -> None:
        mount = hierarchy()
        assert mount is not None
        self._keeper, self._home = keeper, home
        self._group = mount / home.token
        self._group.mkdir()
        units, script = home.path / "units", home.path / "boot"
        units.mkdir()
        for target in TARGETS:
            (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        groups = "/sys/fs/cgroup"
        roots = " ".join(f[4] for f in lines if f[4] == groups) or mount
        script.write_text(_BOOT.format(roots=roots, groups=groups, units=units, systemd=SYSTEMD))
        spaces = [
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--propagation",
            "private",
            "--cgroup",
            "--net",
            "--ipc",
            "--uts",
        ]
        enter = (
            f"echo $$ > {self._group}/cgroup.procs && exec unshare {' '.join(spaces)} sh {script}"
        )
        self._log = home.path / "boot.log"
        with self._log.open("wb") as log:
            self._root = keeper.spawn(
                ["sh", "-c", enter], env=self._environment, stdout=log, stderr=log
            )
        self.prefix: list[str] = []
        wait_until(self._enterable, _TIMEOUT, "systemd is there")
        wait_until(
            lambda: (
                self.run("systemctl", "is-active", "multi-user.target", check=False) == "active"
            ),
            _TIMEOUT,
            "it is up",
        )

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "CZOO_TOKEN": self._home.token}

    def _enterable(self) -> bool:
        assert self._root.alive(), self._log.read_text(errors="replace")
        below = Path(f"/proc/{self._root.pid}/task/{self._root.pid}/children").read_text().split()
        if not below or os.readlink(f"/proc/{below[0]}/exe") != str(SYSTEMD):
            return False
        kinds = [f"--{kind}" for kind in ("pid", "mount", "cgroup", "net", "ipc", "uts")]
        self.prefix = ["nsenter", "--target", below[0], *kinds, "--"]
        return True

    def run(self, *argv: str, check: bool = True) -> str:
        """Run a program under this systemd and return what it prints."""
        path = self._home.path / "answer"
        with path.open("wb") as out:
            process: Launched = self._keeper.spawn(
                [*self.prefix, *argv], env=self._environment, stdout=out, stderr=out
            )
        code, text = process.wait(_TIMEOUT), path.read_text(errors="replace").strip()
        assert code == 0 or not check, f"{argv} ended with {code}: {text}"
        return text

    def close(self) -> None:
        """End all of it."""
        self._root.kill()
        self._root.wait(_TIMEOUT)

        def removed() -> bool:
            for folder, _below, _files in os.walk(self._group, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    return False
            return True

        wait_until(removed, _TIMEOUT, "the control groups are empty")


def available() -> bool:
    """Whether there is a systemd, and a hierarchy for it."""
    return SYSTEMD.exists() and hierarchy() is not None and shutil.which("systemd-run") is not None

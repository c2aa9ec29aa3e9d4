"""Dump and restore the programs of CRIU's test suite with criuctl, or with CRIU alone; the work of
``scripts/criu-suite``.

A program of ``test/zdtm/static`` forks, writes the PID of what is to be dumped to ``NAME.pid``, and
waits for SIGTERM; then it checks whether anything has changed, and writes PASS or FAIL to
``NAME.out``.  With ZDTM_NEWNS it makes its own namespaces, below the folder ZDTM_ROOT: here a
bind mount of the host's root, so that its files are found at the restore.

Results: ``pass``; ``refused``: before the freeze; ``dump`` or ``restore``: that step failed;
``noticed``: the program noticed a change; ``no-start``: this machine lacks something the program
needs, and the result is not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_FLAVOURS = ("host", "ns")
_REFUSED = 4  # criuctl's exit code
_TIMEOUT, _START = 90, 30
_RAW = (
    "--tcp-established",
    "--ext-unix-sk",
    "--file-locks",
    "--link-remap",
    "--shell-job",
    "--network-lock",
    "nftables",
)
_RAW_MOUNTS = ("--external", "mnt[]:ms")


class Suite:
    """The programs in a built source tree, and what dumps and restores them."""

    def __init__(self, folder: Path, *, raw: bool, verbose: bool) -> None:
        self.programs = folder / "criu/test/zdtm/static"
        self.root = folder / "root"
        self.work = folder / "work"
        self.raw = raw
        self.errors = None if verbose else subprocess.DEVNULL
        for made in (self.root, self.work):
            made.mkdir(exist_ok=True)
        own = {
            f"CRIUCTL_{name.upper()}": str(self.work / name.lower())
            for name in ("store", "run_dir", "state_dir")
        }
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith("CRIUCTL_")
        } | own

    def names(self, flavour: str) -> list[str]:
        """Return the programs that are meant for this flavour, by their ``NAME.desc``."""
        words = {"host": "h", "ns": "ns"}
        made = self._run(["make", "-s", "-k", "-j2"], self.env, timeout=1800)
        del made  # what cannot be built here cannot start here
        sources = sorted(
            path.stem
            for path in self.programs.glob("*.c")
            if os.access(path.with_suffix(""), os.X_OK)
        )
        return [
            name
            for name in sources
            if words[flavour] in (self._described(name, "flavor") or "h ns").split()
        ]

    def _described(self, name: str, what: str) -> str:
        """Return a text of ``NAME.desc``, a dictionary in Python's syntax whose other values may be
        calculated.
        """
        path = self.programs / f"{name}.desc"
        text = path.read_text() if path.exists() else ""
        _, found, rest = text.partition(f"'{what}'")
        return rest.split("'")[1] if found else ""

    def result(self, name: str, flavour: str) -> str:
        """Run a program, return its result, and clean up."""
        try:
            return self._result(name, flavour)
        finally:
            self._end(name)

    def _result(self, name: str, flavour: str) -> str:
        pid = self._start(name, flavour)
        if not pid:
            return "no-start"
        try:
            failed, pid = self._raw_trip(pid, flavour) if self.raw else self._trip(name, pid)
            if failed:
                return failed
            os.kill(pid, signal.SIGTERM)
            _wait_gone(pid)
            out = self.programs / f"{name}.out"
            return "pass" if out.exists() and b"PASS" in out.read_bytes().split() else "noticed"
        finally:
            if _alive(pid):
                os.kill(pid, signal.SIGKILL)
                _wait_gone(pid)

    def _end(self, name: str) -> None:
        """Kill what is left of a program, for example one that waits for something that only CRIU's
        own suite does.
        """
        own = str(self.programs / name)
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{entry}/exe") == own:
                    os.kill(int(entry), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or is a kernel thread

    def _start(self, name: str, flavour: str) -> int:
        for path in self.programs.glob(f"{name}.[po]*"):
            if path.name.startswith((f"{name}.pid", f"{name}.out")):
                path.unlink()
        self._run(["make", "-s", f"{name}.cleanout"], self.env)
        env, steps = dict(self.env), ["mount --make-rprivate /"]
        if flavour == "ns":
            env |= {"ZDTM_NEWNS": "1", "ZDTM_ROOT": str(self.root), "ZDTM_DEV": "/dev"}
            steps += [
                f"mount --bind / {shlex.quote(str(self.root))}",
                f"cd {shlex.quote(f'{self.root}{self.programs}')}",
            ]
        if "suid" not in self._described(name, "flags").split():
            env |= {"ZDTM_UID": "0", "ZDTM_GID": "0", "ZDTM_GROUPS": "27495 48244"}
        steps.append(f"exec make -s --no-print-directory {shlex.quote(name)}.pid")
        spaces = ["unshare", "--mount"] if flavour == "ns" else []
        script = "; ".join(steps if spaces else steps[-1:])
        started = self._run(["setsid", *spaces, "sh", "-ec", script], env, _START)
        pid_file = self.programs / f"{name}.pid"
        return int(pid_file.read_text()) if started.returncode == 0 and pid_file.exists() else 0

    def _trip(self, name: str, pid: int) -> tuple[str, int]:
        criuctl = [sys.executable, "-m", "criuctl"]
        session = f"suite-{name.replace('_', '-').replace('+', '-plus').lower()}"
        # The other end of some programs' connections is a process outside of the tree, on this
        # host.
        dumped = self._run(
            [*criuctl, "dump", str(pid), "--name", session, "--connections", "keep", "--json"],
            self.env,
        )
        if dumped.returncode:
            return ("refused" if dumped.returncode == _REFUSED else "dump"), pid
        restored = self._run(
            [*criuctl, "restore", json.loads(dumped.stdout)["checkpoint"], "--json"], self.env
        )
        return ("restore", pid) if restored.returncode else ("", json.loads(restored.stdout)["pid"])

    def _raw_trip(self, pid: int, flavour: str) -> tuple[str, int]:
        images = self.work / f"images-{pid}-{time.monotonic_ns()}"
        images.mkdir()
        criu = [
            *json.loads(
                (Path(os.environ.get("CRIUCTL_PREFIX", "/opt/criuctl")) / "criu.json").read_text()
            )["argv"]
        ]
        common = ["-D", str(images), *_RAW, *(_RAW_MOUNTS if flavour == "ns" else ())]
        if self._run([*criu, "dump", "-t", str(pid), *common], self.env).returncode:
            return "dump", pid
        _wait_gone(pid)
        pid_file = images / "restored.pid"
        restore = [*criu, "restore", "-d", "--pidfile", str(pid_file), *common]
        if flavour == "ns":
            on = shlex.quote(str(self.root))
            script = f'mount --bind / {on}; mount --make-private {on}; exec "$@" --root {on}'
            restore = [
                "unshare",
                "--mount",
                "--propagation",
                "slave",
                "sh",
                "-ec",
                script,
                "sh",
                *restore,
            ]
        if self._run(restore, self.env).returncode:
            return "restore", pid
        return "", int(pid_file.read_text())

    def _run(
        self, argv: list[str], env: dict[str, str], timeout: int = _TIMEOUT
    ) -> subprocess.CompletedProcess[bytes]:
        # Output of the program itself goes to a file: its children keep a pipe open.
        with open(self.work / "output", "w+b") as out:
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=self.programs,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=self.errors,
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            out.seek(0)
            output = out.read()
            if code and self.errors is None:
                print(
                    f"{shlex.join(argv)}: {code}\n{output.decode(errors='replace')}",
                    file=sys.stderr,
                )
            return subprocess.CompletedProcess(argv, code, output)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _wait_gone(pid: int) -> None:
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)


def _expected(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split()[:2] for line in lines if line and not line.startswith("#"))


def _write(path: Path, results: dict[str, str]) -> None:
    """Write the list of expected results, below its present comments."""
    lines = path.read_text().splitlines() if path.exists() else []
    head = [line for line in lines if line.startswith("#")] or [
        "# CRIU's own tests (scripts/criu-suite): FLAVOUR/TEST RESULT"
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "\n".join([*head, *(f"{test} {result}" for test, result in sorted(results.items()))]) + "\n"
    )


def _results(
    suite: Suite, flavours: tuple[str, ...], wanted: list[str]
) -> Iterator[tuple[str, str]]:
    for flavour in flavours:
        for name in (name for name in suite.names(flavour) if not wanted or name in wanted):
            yield f"{flavour}/{name}", suite.result(name, flavour)


def main() -> int:
    """Run the programs; return 1 if a result differs from the expected one."""
    parser = argparse.ArgumentParser(prog="scripts/criu-suite")
    parser.add_argument("--folder", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--expected", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--flavour", choices=_FLAVOURS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    expected, found, differ = _expected(asked.expected), {}, 0
    suite = Suite(asked.folder, raw=asked.raw, verbose=asked.verbose)
    for test, result in _results(
        suite, (asked.flavour,) if asked.flavour else _FLAVOURS, asked.tests
    ):
        found[test] = result
        known = expected.get(test, result)
        other = not asked.raw and "no-start" not in (result, known) and result != known
        differ += other
        print(f"{test:45} {result}{f', expected {known}' if other else ''}", flush=True)
    counts = {result: list(found.values()).count(result) for result in sorted(set(found.values()))}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    if asked.write and not asked.raw:
        _write(asked.expected, expected | found)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

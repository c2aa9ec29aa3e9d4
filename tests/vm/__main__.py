"""The command line behind ``scripts/vm-test``, which makes the image and starts this."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .alone import Alone
from .base import PROJECT
from .checks import Checks
from .lab import Lab
from .machine import VmError
from .outside import Observer
from .result import Result, Row, today
from .systemd import SystemdChecks


def checks_of(kind: type[Checks] | type[SystemdChecks]) -> list[str]:
    """The names of its checks, in order; the first sets up."""
    return [
        name
        for name in vars(kind)
        if name.startswith(("it_", "the_", "a_", "an_", "pre_", "nothing_"))
    ]


MIGRATIONS, SYSTEMD = checks_of(Checks), checks_of(SystemdChecks)


def run(arguments: argparse.Namespace, result: Result) -> None:
    """All of it; `result` is filled as it goes on."""
    result.facts |= {"Date": today(), "Commit": commit()}
    result.facts["Processor"] = "KVM" if arguments.kvm else "emulated (QEMU, TCG), one each"
    began = time.monotonic()
    kind = Alone if arguments.systemd else Lab
    with (
        tempfile.TemporaryDirectory(prefix="criuctl-vm-", dir=arguments.work) as name,
        Observer() as observer,
        kind(
            Path(name), arguments.image, arguments.key, arguments.prepared, kvm=arguments.kvm
        ) as lab,
    ):
        seconds = lab.prepare()
        if seconds is not None:
            print(
                f"scripts/setup on a plain Debian took {seconds:.0f} s; kept for later runs",
                flush=True,
            )
            result.facts["Set-up on a plain Debian"] = f"{seconds:.0f} s"
        booted = lab.boot()
        print(f"up after {booted:.0f} s", flush=True)
        result.facts["Boot" if arguments.systemd else "Boot of both"] = f"{booted:.0f} s"
        checks = (
            SystemdChecks(lab, observer, result)
            if isinstance(lab, Alone)
            else Checks(lab, observer, result)
        )
        known = SYSTEMD if arguments.systemd else MIGRATIONS
        for check in [
            name for name in known if not arguments.checks or name in (known[0], *arguments.checks)
        ]:
            row = one(checks, check)
            result.rows.append(row)
            print(
                f"{'good' if row.good else 'BAD '} {row.seconds:6.1f} s  {row.name}: {row.seen}",
                flush=True,
            )
            if not row.good and check == known[0]:
                break
    result.facts["All of it"] = f"{time.monotonic() - began:.0f} s"


def one(checks: Checks | SystemdChecks, name: str) -> Row:
    """One check, and all machines ready for the next one after it, however it ended."""
    began = time.monotonic()
    words = name.replace("_", " ").replace("pre copy", "pre-copy")
    try:
        seen, good = getattr(checks, name)(), True
    except Exception as error:
        good = False
        seen = str(error) if isinstance(error, VmError) else traceback.format_exc()
        checks.recover()
    return Row(words, good, time.monotonic() - began, seen)


def commit() -> str:
    """Of this checkout; with a plus if something is changed in it that the machines get."""
    words = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    return (
        subprocess.run(
            words, cwd=PROJECT, capture_output=True, text=True, check=False
        ).stdout.strip()
        or "unknown"
    )


def stop(number: int, _frame: FrameType | None) -> NoReturn:
    """A signal ends it in order: machines and files go."""
    raise SystemExit(128 + number)


def main(words: Sequence[str] | None = None) -> int:
    """0 if all is good, else 1."""
    parser = argparse.ArgumentParser(
        prog="scripts/vm-test", description="Checks on real machines (QEMU)."
    )
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help="only these, and set-up; no file is written then"
    )
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("--image", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prepared", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--key", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(os.environ.get("TMPDIR", "/var/tmp")),
        help=argparse.SUPPRESS,
    )
    arguments = parser.parse_args(words)
    arguments.systemd = arguments.checks[:1] == ["systemd"]
    if arguments.systemd:
        del arguments.checks[0]
    known = SYSTEMD if arguments.systemd else MIGRATIONS
    if arguments.list:
        print("\n".join([*MIGRATIONS, *(f"systemd {name}" for name in SYSTEMD)]))
        return 0
    if unknown := set(arguments.checks) - set(known):
        parser.error(f"there is no check {', '.join(unknown)}; --list names them")
    arguments.kvm = os.environ.get("CRIUCTL_KVM") == "1"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    result = Result()
    try:
        run(arguments, result)
    except BaseException:
        result.facts["Ended"] = "before all checks were made"
        raise
    finally:
        print("\n" + result.table())
        if result.rows and not arguments.checks:
            file, word = ("SYSTEMD.md", " systemd") if arguments.systemd else ("RESULT.md", "")
            result.write(Path(__file__).with_name(file), f"scripts/vm-test{word}")
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())

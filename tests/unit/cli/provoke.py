"""criuctl with commands that misbehave on purpose, to see what the boundary makes of them.

Run as a program: the real `criuctl.cli.main.main` over the real group, with a few more entries in
its table.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click

from criuctl import errors
from criuctl.cli import main as program
from criuctl.cli.app import App, pass_app
from criuctl.cli.descriptions import print_each
from criuctl.cli.pages import Entry, page
from criuctl.cli.streams import write_result
from criuctl.host.journal.worst_exit_code import worst
from criuctl.report import Finding


@page()
@click.argument("name")
@pass_app
def fail(app: App, name: str) -> int:
    """Raises the error class NAME, or the built-in exception of that name."""
    cls = getattr(errors, name, None)
    if cls is not None:
        try:
            raise OSError(5, "the cause")
        except OSError as cause:
            raise cls("what happened\x1b[2J", hint="what to do", object="packs/1") from cause
    if name == "findings":
        found = [
            Finding("error", "traced", "is traced", "Stop the tracer.", 12, 3),
            Finding("info", "x", "unimportant"),
        ]
        raise errors.PreflightRefused("not now", findings=[f.to_dict() for f in found])
    if name == "pipe":
        read, write = os.pipe()
        os.close(read)
        os.write(write, b"x")
    if name == "denied":
        raise PermissionError(errno.EACCES, "Permission denied", "/var/lib/criuctl/sessions")
    if name == "file":
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", "/etc/passwd/holders")
    if name == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    if name == "memory":
        raise MemoryError
    if name == "thread":
        try:
            raise RuntimeError("can't start new thread")
        finally:
            threading.Thread().join()
    if name == "descriptors":
        raise OSError(errno.EMFILE, "Too many open files", "pagemap-1.img")
    raise ValueError("boom")


def await_gate(path: str | None) -> None:
    """Until the test makes this file, if it names one."""
    while path is not None and not Path(path).exists():
        time.sleep(0.01)


@page()
@pass_app
def wait(app: App) -> int:
    """Says ready, waits for ever, and when interrupted cleans up until the file named on stdin is
    there.
    """
    gate = sys.stdin.readline().strip()
    try:
        print("ready", flush=True)
        threading.Event().wait()
    finally:
        print("cleaning", flush=True)
        await_gate(gate)
        print("clean", flush=True)
    return 0


@page()
@pass_app
def flood(app: App) -> int:
    """Results without end."""
    while True:
        app.emit({}, lambda: "x" * 65536)


@page()
@pass_app
def tell(app: App) -> int:
    """Every kind of event, then a result."""
    with app.reporting() as reporter:
        reporter.step("freezing", pid=7)
        for i in range(0, 101, 10):
            reporter.progress("pages", i << 20, 100 << 20)
            reporter.progress("upload", i << 19)
        await_gate(os.environ.get("PROVOKE_GATE"))
        reporter.warning("odd \x1b[2J thing", "look at it")
    app.emit({"done": True}, lambda: "done", brief=lambda: "d")
    return 0


@page()
@click.argument("path")
@pass_app
def opens(app: App, path: str) -> int:
    """Opens the file PATH, writes its descriptor into it, and has a result."""
    with open(path, "w") as file:
        file.write(str(file.fileno() > 2))
        file.flush()
        app.emit({"done": True}, lambda: "done")
    return 0


@page()
@click.argument("path")
@pass_app
def each(app: App, path: str) -> int:
    """Does three things, to the end, and notes each in the file PATH when it is done."""

    def outcomes() -> Iterator[int]:
        for number in range(3):
            yield number
            with open(path, "a") as file:
                file.write(str(number))

    def print_one(number: int) -> int:
        if not app.json:
            write_result(str(number))
        return 0

    return worst(print_each(app, outcomes(), print_one, lambda number: number, to_the_end=True))


@page()
@click.argument("name")
@pass_app
def late(app: App, name: str) -> int:
    """Has a result, and fails then."""
    app.emit({"done": True}, lambda: "done")
    if name == "interrupt":
        signal.raise_signal(signal.SIGTERM)
    raise getattr(errors, name, ValueError)("what happened")


@page()
@pass_app
def degraded(app: App) -> int:
    """Exit 11."""
    return 11


MISBEHAVING = ("fail", "wait", "flood", "tell", "opens", "each", "late", "degraded")

if __name__ == "__main__":
    program.COMMANDS.update({name: Entry(f"__main__:{name}", "Misbehave.") for name in MISBEHAVING})
    if os.environ.get("PROVOKE_IGNORE_HUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise SystemExit(program.main())

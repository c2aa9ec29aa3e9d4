"""The events of a running operation, on standard error.

The reporter decides how the same events are shown:

- notices alone (-q, or --json without -v: warnings are in the result's JSON),
- JSON lines (--json -v),
- plain lines when standard error is no terminal: warnings, and steps under -v,
- progress bars on a terminal, one per name that the operation reports, removed at the end.

A reporter never fails its operation: when standard error is closed, the output is dropped. One
thread draws the bars from numbers that the operation's threads store, so reporting costs an
operation (a frozen tree waits for it) almost nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ..redact import redacted
from ..report import Reporter
from .streams import discard, tell
from .text import printable, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_REDRAW = 0.1  # seconds between two drawings of the bars
# clearer titles for some names that operations report
_TITLES = {"pages": "memory read", "upload": "stored"}
_JSON_PROGRESS = 0.5  # seconds between two progress lines of one name


def make_reporter(*, json: bool, verbose: int, quiet: bool, bars: bool = True) -> Reporter:
    """Return the reporter for these options and the kind of standard error."""
    if json and verbose:
        return JsonReporter()
    if json or quiet:
        return NoticeReporter()
    if bars and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return BarReporter(verbose)
    return LineReporter(verbose)


def _facts(facts: dict[str, Any]) -> str:
    return "".join(f"  {key}={printable(value)}" for key, value in facts.items())


class NoticeReporter(Reporter):
    """Notices as lines, and nothing else."""

    def notice(self, text: str, hint: str = "") -> None:
        self._said("", text, hint)

    def _said(self, kind: str, text: str, hint: str) -> None:
        self._line(f"criuctl: {kind}{printable(text)}")
        if hint:
            self._line(f"  hint: {printable(hint)}")

    def _line(self, line: str) -> None:
        tell(line)


class LineReporter(NoticeReporter):
    """Warnings and notices as lines; with `verbose`, steps with the seconds since the start as
    well.
    """

    def __init__(self, verbose: int = 0) -> None:
        super().__init__()
        self._verbose = verbose
        self._started = time.monotonic()

    def step(self, name: str, **facts: Any) -> None:
        if self._verbose:
            self._line(
                f"{time.monotonic() - self._started:8.3f} s  {printable(name)}{_facts(facts)}"
            )
        super().step(name, **facts)

    def warning(self, text: str, hint: str = "") -> None:
        super().warning(text, hint)
        self._said("warning: ", text, hint)


class JsonReporter(Reporter):
    """Every event as one JSON object per line; progress at most twice a second for each name."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()
        self._last: dict[str, float] = {}

    def _event(self, kind: str, **body: Any) -> None:
        import json

        elapsed = round((time.monotonic() - self._started) * 1000)
        tell(json.dumps({"event": kind, "elapsed_ms": elapsed, **body}, default=str))

    def step(self, name: str, **facts: Any) -> None:
        self._event("step", name=name, facts=facts)
        super().step(name, **facts)

    def progress(self, name: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
        now = time.monotonic()
        if done != total and now - self._last.get(name, 0.0) < _JSON_PROGRESS:
            return
        self._last[name] = now
        self._event("progress", name=name, done=done, total=total, unit=unit)

    def warning(self, text: str, hint: str = "") -> None:
        super().warning(text, hint)
        self._event("warning", text=text, hint=hint)

    def notice(self, text: str, hint: str = "") -> None:
        self._event("notice", text=text, hint=hint)


class BarReporter(LineReporter):
    """Bars on a terminal: the current step, and one bar per name with its amount and rate.

    Threads of the operation only store numbers; `_draw` runs in a thread of its own, which also
    imports rich, so that the import (some 70 ms) overlaps with the preflight.
    """

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(verbose)
        self._amounts: dict[str, tuple[int, int | None, str]] = {}
        self._step = ""
        self._over = threading.Event()
        self._lock = threading.Lock()  # guards _live and the order of writing
        self._live: Progress | None = None
        self._thread: threading.Thread | None = None

    def step(self, name: str, **facts: Any) -> None:
        self._step = printable(name)
        super().step(name, **facts)
        self._begin()

    def progress(self, name: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
        self._amounts[name] = (done, total, unit)
        if self._thread is None:
            self._begin()

    def close(self) -> None:
        self._over.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
                self._thread.start()

    def _line(self, line: str) -> None:
        line = redacted(line)
        with self._lock:
            if self._live is None:
                tell(line)
                return
            try:
                self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
            except OSError:
                discard(2)  # the terminal is gone

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn

        class Bar(BarColumn):
            """A bar; nothing for an unknown total, because a pulsing bar says little and is slow to
            draw.
            """

            def render(self, task: Task) -> Any:
                return "" if task.total is None else super().render(task)

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            Bar(bar_width=30),
            TextColumn("{task.fields[amount]}", markup=False),
        )
        live = Progress(
            *columns,
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,  # rich must not replace the streams
            redirect_stderr=False,
        )
        tasks: dict[str, TaskID] = {}
        try:
            while not self._over.wait(_REDRAW):
                with self._lock:
                    if self._live is None:
                        live.start()
                        self._live = live
                    self._update(live, tasks)
                    live.refresh()
        except OSError:
            discard(2)  # the terminal is gone; the operation continues without bars
        finally:
            with self._lock:
                self._live = None
                try:
                    live.stop()
                except OSError:
                    discard(2)

    def _update(self, live: Progress, tasks: dict[str, TaskID]) -> None:
        if self._step or not self._amounts:
            if "" not in tasks:
                tasks[""] = live.add_task(self._step, total=None, amount="")
            live.update(tasks[""], description=self._step)
        for name, (done, total, unit) in list(self._amounts.items()):
            if name not in tasks:
                tasks[name] = live.add_task(
                    _TITLES.get(name, printable(name)), total=total, amount=""
                )
            amount = _amount(done, total, unit)
            speed = live.tasks[live.task_ids.index(tasks[name])].speed
            if speed and unit == "bytes":
                amount += f"  {size(speed)}/s"
            live.update(tasks[name], completed=done, total=total, amount=amount)


def _amount(done: int, total: int | None, unit: str) -> str:
    if unit == "bytes":
        return size(done) if total is None else f"{size(done)} of {size(total)}"
    return f"{done} {unit}" if total is None else f"{done} of {total} {unit}"

"""``criuctl top``: the sessions of this host, drawn again and again, with keys to act on one.

It draws plain text with a few control sequences: a library for it would take longer to load than
all else.  An action is a command of criuctl in a process of its own, as a user would type it.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ...errors import CriuctlError, UsageError
from ..app import App, pass_app
from ..pages import Seconds, page
from ..sessions import command_words, state_words
from ..tables import Column, on_terminal, table
from ..text import age, plural, printable, size

if TYPE_CHECKING:
    from ...ops.top import Sample

_COLUMNS = (
    Column("session"),
    Column("state"),
    Column("cpu", right=True, rank=1),
    Column("memory", right=True, rank=2),
    Column("writer", rank=4, prose=True),
    Column("checkpoint", right=True, rank=3),
    Column("since", right=True, rank=6),
    Column("command", rank=5, prose=True),
)
_KEYS = "a attach  s snapshot  f fork  p pause, resume  k kill  q leave"
_UP, _DOWN = (b"\x1b[A", b"\x1bOA"), (b"\x1b[B", b"\x1bOB")
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_BOLD, _CHOSEN, _PLAIN = "\x1b[1m", "\x1b[7m", "\x1b[m"
_ABOUT = 4  # lines besides the sessions: two above, two below
_LONGEST = 3600.0  # seconds that an action may take


@page(
    examples=[
        ("The sessions that run here:", "criuctl top"),
        ("All that this host knows, every ten seconds:", "criuctl top -a --interval 10"),
    ],
    see_also=["ps", "status", "attach", "metrics"],
)
@click.option(
    "-a", "--all", "all_", is_flag=True, help="Sessions that do not run, too.  [default: not]"
)
@click.option(
    "--interval",
    type=Seconds(min=0.2, max=3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="The time from one look to the next.",
)
@pass_app
def top(app: App, all_: bool, interval: float) -> int:
    """Show the sessions of this host on the whole terminal, drawn again and again: state, share of
    one processor, memory that a dump would read, which client writes, the age of the newest
    checkpoint.

    The arrow keys choose a session. a attaches, and the detach key comes back; s makes a snapshot;
    f a running copy; p freezes it, or lets it go on; k ends it, after a question; q leaves.
    """
    if app.json or not (on_terminal() and os.isatty(0)):
        raise UsageError(
            "top draws on a terminal", hint="`criuctl ps --json` has the sessions for a script."
        )
    from ...ops.top import Sampler

    with Sampler(app.config, all_=all_) as sampler:
        _Screen(app, sampler.look).run(interval)
    return 0


class _Screen:
    """The list on the terminal."""

    def __init__(self, app: App, look: Callable[[], list[Sample]]) -> None:
        self._app, self._look = app, look
        self._samples: list[Sample] = []
        self._chosen = ""  # id of a session
        self._message = ""
        self._asks = ""  # name of the session that is to be killed, if the user says so

    def run(self, interval: float) -> None:
        """Draw and obey until the user leaves."""
        with self._whole():
            while True:
                self._samples = self._look()
                until = time.monotonic() + interval
                while (left := until - time.monotonic()) > 0:
                    self._draw()
                    if not select.select([0], [], [], left)[0]:
                        break
                    key = os.read(0, 64)
                    if not key or key in (b"\x03", b"\x1c") or (key == b"q" and not self._asks):
                        return
                    if self._obey(key):
                        break

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Have the whole terminal, and each key at once."""
        saved = termios.tcgetattr(0)
        try:
            mode = termios.tcgetattr(0)
            mode[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
            termios.tcsetattr(0, termios.TCSADRAIN, mode)
            _write(_ENTER)
            yield
        finally:
            _write(_LEAVE)
            termios.tcsetattr(0, termios.TCSADRAIN, saved)

    # -- drawing ----------------------------------------------------------------------------------

    def _draw(self) -> None:
        columns, lines = os.get_terminal_size(1)
        heading, *rows = table(_COLUMNS, map(_row, self._samples), width=columns).split("\n")
        place, room = self._place(), max(1, lines - _ABOUT)
        first = max(0, min(place - room // 2, len(rows) - room))
        shown = [
            f"{_CHOSEN}{row:{columns}.{columns}}{_PLAIN}" if number == place else row[:columns]
            for number, row in enumerate(rows)
        ][first : first + room]
        running = sum(sample.body["state"] == "running" for sample in self._samples)
        what = (
            f"{plural(len(self._samples), 'session')} of {os.uname().nodename}, {running} running"
        )
        below = f"kill {self._asks}? y or n" if self._asks else self._message or _KEYS
        out = [what[:columns], f"{_BOLD}{heading[:columns]}{_PLAIN}", *shown, "", below[:columns]]
        _write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in out[:-1]) + out[-1] + "\x1b[J")

    def _place(self) -> int:
        """Return the number of the chosen session; the first one if it is gone."""
        ids = [sample.body["id"] for sample in self._samples]
        if self._chosen not in ids:
            self._chosen = ids[0] if ids else ""
        return ids.index(self._chosen) if ids else 0

    # -- keys -------------------------------------------------------------------------------------

    def _obey(self, key: bytes) -> bool:
        """Do what a key says; return whether the sessions have changed."""
        self._message, place = "", self._place()
        if not self._samples:
            return False
        body = self._samples[place].body
        if self._asks:
            name, self._asks = self._asks, ""
            return key in (b"y", b"Y") and self._command("kill", name)
        if key in _UP or key in _DOWN:
            place += 1 if key in _DOWN else -1
            self._chosen = self._samples[place % len(self._samples)].body["id"]
        elif key in (b"a", b"\r", b"\n"):
            return self._attach(body["session"])
        elif key == b"s":
            return self._command("snapshot", body["session"])
        elif key == b"f":
            return self._command("fork", body["session"])
        elif key == b"p":
            return self._command(
                "resume" if body["state"] == "paused" else "pause", body["session"]
            )
        elif key == b"k":
            self._asks = body["session"]
        return False

    def _command(self, *words: str) -> bool:
        """Run a command, and show the last line of what it says."""
        from ...proc import command

        self._message = f"{' '.join(words)} ..."
        self._draw()
        try:
            done = command.run(
                [*self._app.own_program(), *words],
                timeout=_LONGEST,
                env=os.environ,
                check=False,
            )
        except CriuctlError as error:
            self._message = printable(error.message)
        else:
            said = f"{done.text}\n{done.error_text}".strip().splitlines()
            self._message = printable(said[0]) if said else f"{' '.join(words)}: done"
        return True

    def _attach(self, name: str) -> bool:
        """Give the terminal to `criuctl attach`; come back when it ends."""
        from ...proc import terminal_command

        _write(_LEAVE)
        try:
            terminal_command.run([*self._app.own_program(), "attach", name], os.environ)
        except OSError as error:
            self._message = f"attach cannot be started: {error.strerror}"
        _write(_ENTER)
        return True


def _row(sample: Sample) -> Sequence[str]:
    body = sample.body
    return (
        printable(body["session"]),
        state_words(body),
        "" if sample.cpu is None or not body["pid"] else f"{sample.cpu:.0%}",
        size(sample.memory) if body["pid"] else "",
        printable(sample.writer),
        age(sample.checkpoint).removesuffix(" ago") if sample.checkpoint else "never",
        age(body["since"]).removesuffix(" ago") if body["since"] else "",
        command_words(body["command"]),
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

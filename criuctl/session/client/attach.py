"""Attaching this terminal to a session: show the session's output, and type into it.

The loop waits for the keyboard, the holder and the window, never for the terminal.  Output that the
terminal does not take is kept up to a bound; then no more is read, and the holder skips output for
this client (a gap).  `DetachKey` watches what is typed.  `ShownScreen` draws the screen at the
attach, and after a gap or a notice, and shows output.

After a lost connection the client connects again and goes on at the offset where it broke
(`reconnect`).  While the session is checkpointed its clients stay attached, and follow it when it
is restored on this host, or to the host that it has moved to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from typing import Any

from ...errors import CriuctlError, SessionGone, TimedOut
from ...quoting import quoted
from .keyboard import DetachKey, is_report
from .local_terminal import Terminal, fields_of
from .notices import checkpointed_text, harmless, leaving_text, restored_text, say, still_text
from .reconnect import RETRY, Connect, Follow, Moved, Reconnection
from .session import Answer, Event, Output, Session
from .shown_screen import ShownScreen

HEARTBEAT = 10.0
_MAX_WAITING = 512 << 10  # bytes that the terminal has not taken
_MAX_UNANSWERED = 64 << 10  # bytes of input that the session's terminal has not taken
_NOTICE = 4.0  # seconds that a notice stays
_QUIET = 0.2  # seconds without output after a gap, until the screen is drawn again


@dataclass(slots=True)
class Ended:
    """How an attachment ended."""

    how: str  # exited, detached, lost
    exit_code: int | None = None
    text: str = ""


class Attachment:
    """One terminal, attached to one session."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        detach_key: str,
        *,
        within: str = "",
        greeting: str = "",
        clipboard: str = "writers",
        read_only: bool = False,
        take: bool = False,
        start: int | None = None,
        patience: float = 10.0,
        follow: Follow | None = None,
    ) -> None:
        """`within`: the id of the session in which this terminal is.  `greeting`: a notice to begin
        with.  `clipboard`: as in the configuration.

        `start`: show the log from that offset on, instead of drawing the present screen.

        `patience`: seconds in which a lost connection must come back.  `follow`: connects to the
        host that the session has moved to.
        """
        self.name, self._detach_key = name, detach_key
        self._within, self._greeting, self._clipboard = within, greeting, clipboard
        self._read_only, self._take, self._start = read_only, take, start
        self._reconnection = Reconnection(connect, patience, follow)
        self._moved: Moved | None = None  # follow the session there
        self.session: Session
        self._terminal: Terminal
        self._shown: ShownScreen
        self._key = DetachKey(detach_key)
        self._keyboard = True  # something may still be typed
        self._position = 0  # offset of the next byte that is needed
        self._lease: dict[str, Any] | None = None
        self._state = "running"
        self._first = False  # the user has not attached to this session before
        self._typed = bytearray()  # not sent yet
        self._unanswered: dict[int, int] = {}  # request -> bytes not taken yet
        self._redraw_at: float | None = None
        self._gap = False  # output was skipped: draw again once it is quiet
        self._refused_at = 0.0
        self._window_changed = False
        self._ended: Ended | None = None

    def run(self, session: Session) -> Ended:
        """Attach until the session ends, the detach key is pressed, or the connection is lost."""
        self.session = session
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.signal(signal.SIGWINCH, self._on_window)
        number = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            with Terminal() as terminal:
                self._terminal, self._shown = terminal, ShownScreen(terminal)
                try:
                    self._begin()
                    self._loop(wake)
                finally:
                    if terminal.is_terminal and terminal.drew:
                        self._shown.leave()
                    if (
                        terminal.is_terminal
                        and self._ended is not None
                        and self._ended.how != "exited"
                    ):
                        terminal.put(b"\r\n")  # the cursor may be in the middle of a line
        finally:
            signal.set_wakeup_fd(number)
            signal.signal(signal.SIGWINCH, before)
            os.close(wake)
            os.close(woken)
        assert self._ended is not None
        return self._ended

    # -- attaching --------------------------------------------------------------------------------

    def _begin(self) -> None:
        status = self.session.hello["status"]
        self._terminal.drew = True
        if status.get("moved_to"):
            self._moved = Moved(status["moved_to"], status["home"])
            return
        if self._take and not self._read_only:
            self.session.lease_take()
        if self._start is not None or not self._terminal.is_terminal:
            self._attach(status["offset"] if self._start is None else self._start)
        else:
            self._draw(history=True)
            if self._redraw_at is not None and self._ended is None:
                self._restore_screen()  # the session has this terminal's size now
        if self._ended is not None:
            return
        restored = status.get("restored")
        if self._state == "checkpointed":
            self._notice(
                checkpointed_text(self.name, status.get("checkpoint"), self._detach_key), stay=True
            )
        elif restored:
            self._notice(restored_text(self.name, status["incarnation"], restored))
        elif self._state == "paused":
            self._notice(
                f"{self.name} is paused; `criuctl resume {quoted(self.name)}` lets it go on"
            )
        elif (
            not self._read_only
            and self._lease is not None
            and not self._lease.get("soft")
            and not self._mine
        ):
            self._notice(
                f"{self._writer()} writes in {self.name}; attach with --take to write yourself"
            )
        elif self._greeting:
            self._notice(self._greeting)
        elif self._first and self._start is None and self._detach_key:
            if self._terminal.keyboard and self._terminal.is_terminal:
                self._notice(leaving_text(self.name, self._detach_key))

    def _attach(self, start: int) -> None:
        """Ask for output from `start` on, and for the write lease if it is free."""
        arguments: dict[str, Any] = {
            "from": start,
            "answers": self._terminal.is_terminal and self._terminal.keyboard,
        }
        if self._within:
            arguments["within"] = self._within
        if not self._read_only:
            arguments["write"] = True
            if self._terminal.size is not None:
                arguments["size"] = fields_of(self._terminal.size)
        answer = self.session.request("attach", **arguments)
        self._lease = answer["lease"]
        self._position = answer["offset"]
        self._shown.attached(answer)
        self._decide_clipboard()
        self._fit(answer)
        self._state = answer["state"]
        # Not over a program that has the whole screen for itself.
        self._first |= answer.get("first", False) and not answer["modes"]["alternate"]
        if self._state in ("exited", "lost"):
            self._finish_output()  # that event came before this client

    def _decide_clipboard(self) -> None:
        """Let the output set this terminal's clipboard, or not: a client that may write could have
        had it anyway.
        """
        writes = not self._read_only and self.session.role != "observe"
        self._shown.clipboard = self._clipboard == "all" or (
            self._clipboard == "writers" and writes
        )

    def _finish_output(self) -> None:
        """Show the last output of the ended session, then end with its exit code."""
        status = self.session.status()
        while self._position < status["offset"]:
            message = self.session.receive(5.0)
            if message is None:
                break
            self._on_message(message)
        self._ended = Ended(
            "exited" if status["state"] == "exited" else "lost", status["exit_code"]
        )

    def _draw(self, *, history: bool) -> None:
        """Draw the session's present screen, and have its output go on there."""
        position = self._shown.draw(self.session, history=history)
        self._attach(self._position if position is None else position)

    def _fit(self, size: dict[str, Any]) -> None:
        """Draw the screen again if it fits no longer, or again, into the terminal."""
        if self._shown.too_small(size["rows"], size["cols"]) != self._shown.clipped:
            self._redraw_at = time.monotonic()

    # -- the loop ---------------------------------------------------------------------------------

    def _loop(self, wake: int) -> None:
        terminal = self._terminal
        beat = time.monotonic() + HEARTBEAT
        while self._ended is None:
            if self._moved is not None:
                self._go_after(self._moved)
                continue
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            if self._listens:
                poll.register(terminal.stdin, select.POLLIN)
            if terminal.waiting < _MAX_WAITING:
                poll.register(self.session.fileno(), select.POLLIN)
            if terminal.waiting:
                poll.register(terminal.out, select.POLLOUT)
            now = time.monotonic()
            due = min(t for t in (beat, self._redraw_at, self._shown.due) if t is not None)
            ready = dict(poll.poll(0 if self.session.pending else max(0.0, due - now) * 1000))
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            if self._window_changed:
                self._window_changed = False
                if self._mine:
                    self._resize()
                else:
                    self._redraw_at = time.monotonic()
            if terminal.out in ready and terminal.waiting:
                terminal.flush()
            try:
                if terminal.stdin in ready:
                    self._read_keyboard()
                if self.session.fileno() in ready or self.session.pending:
                    self._read_session()
                self._type()
                if self._shown.due is not None and time.monotonic() >= self._shown.due:
                    self._shown.update()
                if time.monotonic() >= beat:
                    beat = time.monotonic() + HEARTBEAT
                    if self._mine:
                        self.session.submit("heartbeat")
                if (
                    self._redraw_at is not None
                    and time.monotonic() >= self._redraw_at
                    and self._ended is None
                ):
                    self._restore_screen()
            except (SessionGone, TimedOut) as error:  # no answer for so long: take it for lost
                if self._ended is None:
                    self._come_back(error)

    def _read_session(self) -> None:
        for _ in range(16):
            message = self.session.receive(0)
            if message is None:
                return
            self._on_message(message)
            if (
                self._ended is not None
                or self._terminal.waiting >= _MAX_WAITING
                or self._shown.clipped  # slow: look at the keyboard in between
            ):
                return

    def _on_message(self, message: Output | Event | Answer) -> None:
        if isinstance(message, Output):
            self._position = message.end
            self._shown.show(message)
            if self._redraw_at is not None and self._gap:
                self._redraw_at = time.monotonic() + _QUIET
        elif isinstance(message, Event):
            self._on_event(message)
        else:
            typed = message.id == 0 or self._unanswered.pop(message.id, None) is not None
            if typed and message.error is not None:
                self._on_refusal(message.error)

    # -- what the holder reports ------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        body = event.body
        if event.name == "exit":
            self._ended = Ended(
                "lost" if body.get("exit_code") is None else "exited", body.get("exit_code")
            )
        elif event.name == "gap":
            self._position = int(body["to"])
            self._gap = True
            self._redraw_at = time.monotonic() + _QUIET
        elif event.name == "resize":
            self._fit(body)
        elif event.name == "operator" and body.get("operator") == self.session.operator:
            self.session.role = str(body.get("role"))
            self._decide_clipboard()
        elif event.name == "lease":
            was, self._lease = self._mine, body.get("lease")
            if self._mine and not was:
                self._resize()
        elif event.name == "checkpointed":
            self._state = "checkpointed"
            self._notice(
                checkpointed_text(self.name, body.get("checkpoint"), self._detach_key), stay=True
            )
        elif event.name == "restored":
            self._state = "running"
            self._notice(restored_text(self.name, body["incarnation"], body))
            if self._mine:
                self._resize()
        elif event.name in ("paused", "halted"):
            self._notice(still_text(self.name, event.name, body.get("by")), stay=True)
        elif event.name == "fenced":
            self._notice(f"{body.get('reason')}; this copy of it is stopped", stay=True)
        elif event.name == "resumed":
            self._restore_screen()
        elif event.name == "moved":
            self._moved = Moved(str(body.get("to")), str(body.get("host")))
        elif event.name == "shutdown":
            self._ended = Ended("lost", text="its holder was shut down")

    def _on_refusal(self, error: CriuctlError) -> None:
        """Handle a refusal of what was typed."""
        if self._terminal.is_terminal:
            self._terminal.put(b"\a")
        if time.monotonic() - self._refused_at > _NOTICE:
            self._refused_at = time.monotonic()
            self._notice(f"not typed: {error.message}")

    # -- typing -----------------------------------------------------------------------------------

    @property
    def _listens(self) -> bool:
        """Whether input is read now.

        A pipe is read no faster than the session takes it; a person must always be able to detach.
        """
        return self._keyboard and (self._terminal.keyboard or len(self._typed) < _MAX_UNANSWERED)

    def _read_keyboard(self) -> None:
        """Take what was typed, or notice that the input has ended."""
        try:
            data = os.read(self._terminal.stdin, 65536)
        except OSError:
            data = b""
        if not data:
            if self._terminal.keyboard:
                self._ended = Ended("detached", text="the terminal hung up")
            elif not self._read_only:
                self._typed += b"\x04"  # a terminal's end of input
            self._keyboard = False
            return
        forward, detached = self._key.feed(data)
        if detached:
            self._ended = Ended("detached")
        if forward and not self._read_only and (self._mine or not is_report(forward)):
            self._typed += forward

    def _type(self) -> None:
        while self._typed and sum(self._unanswered.values()) < _MAX_UNANSWERED:
            piece = bytes(self._typed[:16384])
            del self._typed[: len(piece)]
            self._unanswered[self.session.submit_input(piece, answered=True)] = len(piece)

    def _on_window(self, number: int, frame: Any) -> None:
        self._window_changed = True

    def _resize(self) -> None:
        size = self._terminal.size
        if self._mine and size is not None and self._ended is None:
            with contextlib.suppress(SessionGone):
                self.session.submit("resize", fds=(), **fields_of(size))

    @property
    def _mine(self) -> bool:
        return self._lease is not None and self._lease["operator"] == self.session.operator

    def _writer(self) -> str:
        lease = self._lease or {}
        return f"{lease.get('name')} ({lease.get('kind')})"

    # -- notices ----------------------------------------------------------------------------------

    def _notice(self, text: str, *, stay: bool = False) -> None:
        """Show one line at the top of the screen, for a while or until the next; at the bottom if
        the cursor was in the first line, as a new session's prompt is.

        Without a terminal it goes to standard error.
        """
        size = self._terminal.size
        if not self._terminal.is_terminal or size is None:
            say(text)
            return
        shown = f" {harmless(text)} "[: size[1]].encode("ascii", "replace")
        row = size[0] if self._shown.at_top else 1
        self._terminal.put(b"\x1b7\x1b[?6l\x1b[%d;1H\x1b[0;7m" % row + shown + b"\x1b[m\x1b8")
        self._gap = False
        self._redraw_at = None if stay else time.monotonic() + _NOTICE

    def _restore_screen(self) -> None:
        """Draw the screen again, without notices and gaps; later, if output comes at this moment:
        what the program prints must be in this terminal's scrollback.
        """
        gap, self._redraw_at, self._gap = self._gap, None, False
        if not self._terminal.is_terminal:
            return
        self.session.detach()
        came = False
        while self.session.pending and self._ended is None:
            message = self.session.receive(0)
            if message is not None and not (gap and isinstance(message, Output)):
                came |= isinstance(message, Output)
                self._on_message(message)
        if came and self._ended is None:
            self._attach(self._position)
            self._redraw_at = time.monotonic() + _QUIET
        elif self._ended is None:
            self._draw(history=False)

    # -- the connection is lost -------------------------------------------------------------------

    def _come_back(self, error: CriuctlError) -> None:
        """Connect again as the same operator and go on where the output broke off.

        Try again if the new connection breaks at once.
        """
        while self._ended is None:
            self.session.close()
            self._unanswered.clear()
            try:
                session = self._reconnection.again(self.session, error, self._pause)
            except Moved as moved:
                self._moved = moved
                return
            except SessionGone as gone:
                self._ended = Ended("lost", text=gone.message)
                return
            if session is None:
                return
            self.session = session
            try:
                self._attach(self._position)
            except (SessionGone, TimedOut) as again:
                error = again
                self._pause(RETRY)
            else:
                self._resize()
                return

    def _go_after(self, moved: Moved) -> None:
        """Go on at another host where the output broke off here."""
        self._moved = None
        self.session.leave()
        self._unanswered.clear()
        try:
            session = self._reconnection.after(moved, self._pause)
        except SessionGone as gone:
            self._ended = Ended("lost", text=gone.message)
            return
        if session is None:
            return
        self.session, self._lease = session, None
        try:
            if self._position:
                self._attach(self._position)
                self._resize()
            else:
                self._begin()
        except (SessionGone, TimedOut) as error:
            self._come_back(error)
            if self._ended is not None or self._moved is not None:
                return  # it has left that host
        incarnation = self.session.hello["status"]["incarnation"]
        self._notice(f"criuctl: moved to {moved.host}, {self.name} is incarnation {incarnation}")

    def _pause(self, seconds: float) -> bool:
        """Wait for the next attempt; the detach key works meanwhile."""
        poll = select.poll()
        if self._listens:
            poll.register(self._terminal.stdin, select.POLLIN)
        if poll.poll(seconds * 1000):
            self._read_keyboard()
            time.sleep(0.01)
        return self._ended is None

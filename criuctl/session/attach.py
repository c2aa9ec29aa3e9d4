"""Being attached: this terminal shows a session, and types into it.

The loop waits for the keyboard, the holder and the window, never for the terminal: output that the terminal does not take
is kept up to a bound, then no more is read, and the holder skips ahead for us (a gap).  `DetachKey` watches
what is typed.  Where the cells of the screen are needed, at the attach and after a gap or a notice, they are made from the
log by `screen`; while output merely flows it is passed on as it is.

A lost connection is made again and goes on at the offset where it broke.  While the session is checkpointed its operators
stay, and follow it when it is restored on this host.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import struct
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from ..errors import CriuctlError, NotFound, SessionGone
from . import keys
from .client import Answer, Event, Output, Session

Connect = Callable[[tuple[str, str] | None], Session]
"""Makes a connection, resuming the operator (id, token) if one is given."""

Follow = Callable[[str], Connect]
"""Makes what connects to a session by its address, which has moved there."""

HEARTBEAT = 10.0
REPLAY = 256 << 10  # bytes of the log that a redraw looks at
_REPLAY_MAX = 2 << 20  # ... or more, if a full-screen program began that long ago
_MAX_WAITING = 512 << 10  # bytes that the terminal has not taken
_MAX_UNANSWERED = 64 << 10  # bytes of input on their way
_NOTICE = 4.0  # seconds that a notice stays
_QUIET = 0.2  # seconds without output after a gap, until the screen is drawn again
_RETRY = 0.2
_FOLLOW_SECONDS = 20.0  # for reaching the host that the session has moved to
_LINK_SECONDS = 3600.0  # that a lost connection to another host may take to come back
_PASTE_BEGIN, _PASTE_END = b"\x1b[200~", b"\x1b[201~"

# What brings a terminal back to how a shell wants it, whatever a session's programs have asked of it.
RESET = (
    b"\x1b7\x1b[?6l\x1b[r\x1b8"  # margins go, the cursor stays
    b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1004l\x1b[?1005l\x1b[?1006l\x1b[?1015l\x1b[?1016l"
    b"\x1b[?2004l\x1b[?1l\x1b>\x1b[4l\x1b[?7h\x1b[?25h\x1b(B\x1b)B\x0f\x1b[0 q\x1b[>4m\x1b[m"
)
_LEAVE_ALTERNATE = b"\x1b[?1049l"


class DetachKey:
    """Finds the detach key in what is typed: across reads, never in a bracketed paste."""

    def __init__(self, key: str) -> None:
        found = keys.sequences(key)
        self._held_ones = [s for s in found if not s.startswith(b"\x1b")]
        # A lone escape must not wait for what may follow, so these are only recognised, not held back.
        self._seen_ones = [s for s in found if s.startswith(b"\x1b")]
        self._held = b""  # the beginning of the key, not passed on yet
        self._tail = b""  # the end of what was passed on
        self._paste = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What is to be passed on, and whether the key came; what follows it is dropped."""
        out = bytearray()
        at = 0
        while at < len(data):
            if self._paste:
                at = self._pass(data, at, out)
                continue
            ahead = self._held + data[at : at + 1]
            at += 1
            if ahead in self._held_ones:
                self._held = b""
                return bytes(out), True
            while ahead and not any(s.startswith(ahead) for s in self._held_ones):
                if self._put(ahead[:1], out):
                    return bytes(out), True
                ahead = ahead[1:]
            self._held = ahead
        return bytes(out), False

    def _pass(self, data: bytes, at: int, out: bytearray) -> int:
        """Inside a paste: everything goes on up to its end."""
        joined = self._tail + data[at:]
        end = joined.find(_PASTE_END)
        stop = len(data) if end < 0 else at + end + len(_PASTE_END) - len(self._tail)
        out += data[at:stop]
        self._tail = (self._tail + data[at:stop])[-16:]
        if end >= 0:
            self._paste, self._tail = False, b""
        return stop

    def _put(self, byte: bytes, out: bytearray) -> bool:
        self._tail = (self._tail + byte)[-16:]
        out += byte
        if self._tail.endswith(_PASTE_BEGIN):
            self._paste, self._tail = True, b""
        for sequence in self._seen_ones:
            if self._tail.endswith(sequence):
                del out[max(0, len(out) - len(sequence)) :]
                return True
        return False


class Terminal:
    """Our own terminal: raw inside of the ``with`` block, put back after it.  Works, plainer, with pipes too."""

    def __init__(self, stdin: int = 0, stdout: int = 1) -> None:
        self.stdin, self._stdout = stdin, stdout
        self.keyboard, self.is_terminal = os.isatty(stdin), os.isatty(stdout)
        self._saved: list[Any] | None = None
        self._out = stdout
        self._small = False  # a write might block: small ones, when there is room
        self._waiting: deque[memoryview] = deque()
        self.waiting = 0  # bytes not taken yet
        self.drew = False

    def __enter__(self) -> Self:
        mode = os.fstat(self._stdout).st_mode
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            # A description of our own: O_NONBLOCK on the one that we were given would hit everybody who shares it.
            if self.is_terminal:
                self._out = os.open(os.ttyname(self._stdout), flags)
            elif stat.S_ISFIFO(mode):
                self._out = os.open(f"/proc/self/fd/{self._stdout}", flags)
            else:
                self._small = not stat.S_ISREG(mode)
        except OSError:
            self._small = True
        if self.keyboard:
            self._saved = termios.tcgetattr(self.stdin)
            tty.setraw(self.stdin, termios.TCSANOW)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with contextlib.suppress(OSError):
                self._finish()
        finally:
            if self._saved is not None:
                with contextlib.suppress(termios.error):
                    # At once: a terminal that was stopped (^S) would never drain.
                    termios.tcsetattr(self.stdin, termios.TCSANOW, self._saved)
            if self._out != self._stdout:
                os.close(self._out)

    @property
    def size(self) -> tuple[int, int, int, int] | None:
        """Rows, columns and both in pixels; None where there is no terminal, or it does not know."""
        for fd in (self._stdout, self.stdin):
            with contextlib.suppress(OSError):
                rows, columns, x, y = struct.unpack("4H", _window(fd))
                if rows and columns:
                    return rows, columns, x, y
        return None

    @property
    def out(self) -> int:
        """The descriptor to wait for while something is waiting."""
        return self._out

    def put(self, data: bytes | memoryview) -> None:
        """Show this, now or as soon as the terminal takes it."""
        if data:
            self._waiting.append(memoryview(data))
            self.waiting += len(data)
            if len(self._waiting) == 1:
                self.flush()

    def flush(self) -> None:
        """Write what the terminal takes.  `BrokenPipeError` when nobody reads any more."""
        while self._waiting:
            if self._small and not select.select([], [self._out], [], 0)[1]:
                return
            piece = self._waiting[0]
            try:
                count = os.write(self._out, piece[:4096] if self._small else piece)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EIO:  # the terminal hung up; SIGHUP is on its way
                    self._waiting.clear()
                    self.waiting = 0
                    return
                raise
            self.waiting -= count
            if count == len(piece):
                self._waiting.popleft()
            else:
                self._waiting[0] = piece[count:]

    def _finish(self) -> None:
        """What is waiting is still shown, then the modes are put back; a terminal that stands still is given up."""
        deadline = time.monotonic() + 2.0
        if self.is_terminal and self.drew:
            self.put(RESET)
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._out], [], left)
            self.flush()


def _window(fd: int) -> bytes:
    import fcntl

    return fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8)


@dataclass(slots=True)
class Ended:
    """How an attachment ended."""

    how: str  # exited, detached, lost
    exit_code: int | None = None
    text: str = ""


class Attachment:
    """One terminal that is attached to one session."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        detach_key: str,
        *,
        read_only: bool = False,
        take: bool = False,
        start: int | None = None,
        patience: float = 10.0,
        follow: Follow | None = None,
    ) -> None:
        """`start` shows the log from that offset on, as it is, instead of drawing the screen of now.

        `patience` is how many seconds a lost connection may take to come back; `follow` leads to where the session has moved.
        """
        self._follow = follow
        self._moved: tuple[str, str] | None = None  # address and name of the host to follow the session to
        self.name, self._connect, self._detach_key = name, connect, detach_key
        self._read_only, self._take, self._start, self._patience = read_only, take, start, patience
        self.session: Session
        self._terminal: Terminal
        self._key = DetachKey(detach_key)
        self._position = 0  # offset of the next byte that we need
        self._alternate = False  # our terminal shows its alternate screen
        self._escape = b""  # the end of the output, where a sequence may be cut in two
        self._lease: dict[str, Any] | None = None
        self._state = "running"
        self._typed = bytearray()  # not sent yet
        self._unanswered: dict[int, int] = {}  # request -> bytes on their way to the session's terminal
        self._redraw_at: float | None = None
        self._gap = False  # output was skipped: draw again once it is quiet
        self._refused_at = 0.0
        self._window_changed = False
        self._ended: Ended | None = None

    def run(self, session: Session) -> Ended:
        """Attach, until the session ends, the detach key comes, or the connection is lost for good."""
        self.session = session
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.signal(signal.SIGWINCH, self._on_window)
        number = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            with Terminal() as terminal:
                self._terminal = terminal
                try:
                    self._begin()
                    self._loop(wake)
                finally:
                    if terminal.is_terminal and terminal.drew and self._alternate:
                        terminal.put(_LEAVE_ALTERNATE)
                    if terminal.is_terminal and self._ended is not None and self._ended.how != "exited":
                        terminal.put(b"\r\n")  # the cursor is in the middle of somebody's line
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
            self._moved = (status["moved_to"], status["home"])
            return
        if self._take and not self._read_only:
            self.session.lease_take()
        if self._start is not None or not self._terminal.is_terminal:
            self._attach(status["offset"] if self._start is None else self._start)
        else:
            self._draw(history=True)
            self._attach(self._position)
        if self._ended is not None:
            return
        restored = status.get("restored")
        if self._state == "checkpointed":
            self._notice(self._checkpointed_text(status.get("checkpoint")), stay=True)
        elif restored:
            self._notice(restored_text(self.name, status["incarnation"], restored))
        elif self._state == "paused":
            self._notice(f"{self.name} is paused; `criuctl resume {self.name}` lets it go on")
        elif not self._read_only and self._lease is not None and not self._lease.get("soft") and not self._mine:
            self._notice(f"{self._writer()} writes in {self.name}; attach with --take to write yourself")

    def _attach(self, start: int) -> None:
        """Have output pushed from `start`; with the write lease if it is to be had."""
        arguments: dict[str, Any] = {"from": start}
        if not self._read_only:
            arguments["write"] = True
            if self._terminal.size is not None:
                arguments["size"] = _size(self._terminal.size)
        answer = self.session.request("attach", **arguments)
        self._lease = answer["lease"]
        self._position = answer["offset"]
        self._state = answer["state"]
        if self._state in ("exited", "lost"):
            self._finish_output()  # that event was before our time

    def _finish_output(self) -> None:
        """The session is over: what it printed last, then its exit code."""
        status = self.session.status()
        while self._position < status["offset"]:
            message = self.session.receive(5.0)
            if message is None:
                break
            self._on_message(message)
        self._ended = Ended("exited" if status["state"] == "exited" else "lost", status["exit_code"])

    def _draw(self, *, history: bool = False) -> None:
        """Show the session's screen as it is now; what comes after it is at `_position`."""
        size = self._terminal.size
        if size is None:
            return
        status = self.session.status()
        screen = replay(self.session, status)
        if history:
            self._terminal.put(b"\r\n" * size[0])  # what is on our screen goes into the scrollback
        elif self._alternate:
            self._terminal.put(_LEAVE_ALTERNATE)
        self._terminal.put(RESET + screen.redraw(size[0], size[1], history=history))
        self._alternate = screen.alternate
        self._position = screen.end

    # -- the loop ---------------------------------------------------------------------------------

    def _loop(self, wake: int) -> None:
        terminal = self._terminal
        keyboard = True
        beat = time.monotonic() + HEARTBEAT
        while self._ended is None:
            if self._moved is not None:
                self._go_after(*self._moved)
                continue
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            if keyboard:
                poll.register(terminal.stdin, select.POLLIN)
            if terminal.waiting < _MAX_WAITING:
                poll.register(self.session.fileno(), select.POLLIN)
            if terminal.waiting:
                poll.register(terminal.out, select.POLLOUT)
            now = time.monotonic()
            due = beat if self._redraw_at is None else min(beat, self._redraw_at)
            ready = dict(poll.poll(0 if self.session.pending else max(0.0, due - now) * 1000))
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            if self._window_changed:
                self._window_changed = False
                self._resize()
            if terminal.out in ready and terminal.waiting:
                terminal.flush()
            try:
                if keyboard and terminal.stdin in ready:
                    keyboard = self._read_keyboard()
                if self.session.fileno() in ready or self.session.pending:
                    self._read_session()
                self._type()
                if time.monotonic() >= beat:
                    beat = time.monotonic() + HEARTBEAT
                    if self._mine:
                        self.session.submit("heartbeat")
                if self._redraw_at is not None and time.monotonic() >= self._redraw_at and self._ended is None:
                    self._restore_screen()
            except SessionGone as error:
                if self._ended is None:
                    self._come_back(error)

    def _read_session(self) -> None:
        for _ in range(16):
            message = self.session.receive(0)
            if message is None:
                return
            self._on_message(message)
            if self._ended is not None or self._terminal.waiting >= _MAX_WAITING:
                return

    def _on_message(self, message: Output | Event | Answer) -> None:
        if isinstance(message, Output):
            self._position = message.end
            self._watch_alternate(message.data)
            self._terminal.put(message.data)
            if self._redraw_at is not None and self._gap:
                self._redraw_at = time.monotonic() + _QUIET
        elif isinstance(message, Event):
            self._on_event(message)
        else:
            typed = message.id == 0 or self._unanswered.pop(message.id, None) is not None
            if typed and message.error is not None:
                self._on_refusal(message.error)

    def _watch_alternate(self, data: bytes) -> None:
        """Whether the terminal shows its alternate screen, for the moment when we leave."""
        if b"\x1b" not in data and not self._escape:
            return
        joined = self._escape + data
        on = max(joined.rfind(b"\x1b[?1049h"), joined.rfind(b"\x1b[?1047h"), joined.rfind(b"\x1b[?47h"))
        off = max(joined.rfind(b"\x1b[?1049l"), joined.rfind(b"\x1b[?1047l"), joined.rfind(b"\x1b[?47l"), joined.rfind(b"\x1bc"))
        if on >= 0 or off >= 0:
            self._alternate = on > off
        self._escape = joined[-7:] if b"\x1b" in joined[-7:] else b""

    # -- what the holder tells --------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        body = event.body
        if event.name == "exit":
            self._ended = Ended("lost" if body.get("exit_code") is None else "exited", body.get("exit_code"))
        elif event.name == "gap":
            self._position = int(body["to"])
            self._gap = True
            self._redraw_at = time.monotonic() + _QUIET
        elif event.name == "lease":
            was, self._lease = self._mine, body.get("lease")
            if self._mine and not was:
                self._resize()
        elif event.name == "checkpointed":
            self._state = "checkpointed"
            self._notice(self._checkpointed_text(body.get("checkpoint")), stay=True)
        elif event.name == "restored":
            self._state = "running"
            self._notice(restored_text(self.name, body["incarnation"], body))
            if self._mine:
                self._resize()
        elif event.name in ("paused", "halted"):
            by = body.get("by") or {}
            self._notice(
                f"{self.name} was {event.name} by {by.get('name')}; `criuctl resume {self.name}` lets it go on", stay=True
            )
        elif event.name == "fenced":
            self._notice(f"{body.get('reason')}; this copy of it is stopped", stay=True)
        elif event.name == "resumed":
            self._restore_screen()
        elif event.name == "moved":
            self._moved = (str(body.get("to")), str(body.get("host")))
        elif event.name == "shutdown":
            self._ended = Ended("lost", text="its holder was shut down")

    def _on_refusal(self, error: CriuctlError) -> None:
        """What was typed did not reach the session."""
        if self._terminal.is_terminal:
            self._terminal.put(b"\a")
        if time.monotonic() - self._refused_at > _NOTICE:
            self._refused_at = time.monotonic()
            self._notice(f"not typed: {error.message}")

    # -- typing -----------------------------------------------------------------------------------

    def _read_keyboard(self) -> bool:
        """Take what was typed; False at the end of the input."""
        try:
            data = os.read(self._terminal.stdin, 65536)
        except OSError:
            data = b""
        if not data:
            if self._terminal.keyboard:
                self._ended = Ended("detached", text="the terminal hung up")
            elif not self._read_only:
                self._typed += b"\x04"  # a terminal's end of input
            return False
        forward, detached = self._key.feed(data)
        if detached:
            self._ended = Ended("detached")
        if forward and not self._read_only and (self._mine or not _is_report(forward)):
            self._typed += forward
        return True

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
                self.session.submit("resize", fds=(), **_size(size))

    @property
    def _mine(self) -> bool:
        return self._lease is not None and self._lease["operator"] == self.session.operator

    def _writer(self) -> str:
        lease = self._lease or {}
        return f"{lease.get('name')} ({lease.get('kind')})"

    # -- notices ----------------------------------------------------------------------------------

    def _checkpointed_text(self, checkpoint: object) -> str:
        key = f"; {self._detach_key} leaves" if self._detach_key else ""
        return (
            f"{self.name} is checkpointed ({str(checkpoint or '')[:12]}); it goes on here when it is restored on this host{key}"
        )

    def _notice(self, text: str, *, stay: bool = False) -> None:
        """One line over the top of the screen, for a while or until the next; on a pipe it goes to standard error."""
        size = self._terminal.size
        if not self._terminal.is_terminal or size is None:
            with contextlib.suppress(OSError):
                os.write(2, f"[{text}]\n".encode())
            return
        shown = f" {text} "[: size[1]].encode("ascii", "replace")
        self._terminal.put(b"\x1b7\x1b[?6l\x1b[1;1H\x1b[0;7m" + shown + b"\x1b[m\x1b8")
        self._gap = False
        self._redraw_at = None if stay else time.monotonic() + _NOTICE

    def _restore_screen(self) -> None:
        """The screen as it is, without notices and gaps."""
        self._redraw_at, self._gap = None, False
        if not self._terminal.is_terminal:
            return
        self.session.detach()
        while self.session.pending:
            message = self.session.receive(0)
            if message is not None and not isinstance(message, Output):
                self._on_message(message)
        self._draw()
        self._attach(self._position)

    # -- the connection is lost -------------------------------------------------------------------

    def _come_back(self, error: SessionGone) -> None:
        """Connect again as the same operator and go on where the output broke off."""
        resume: tuple[str, str] | None = (self.session.operator, self.session.token)
        self.session.close()
        deadline = time.monotonic() + self._patience
        self._unanswered.clear()
        while self._ended is None:
            try:
                session = self._connect(resume)
            except NotFound as gone:
                if gone.details.get("moved_to"):
                    self._moved = (gone.details["moved_to"], gone.details["home"])
                    return
                if time.monotonic() >= deadline:
                    self._ended = Ended("lost", text=gone.message or error.message)
                    return
                if not isinstance(gone, SessionGone):
                    resume = None  # another holder than before, who does not know us: as somebody new
                self._pause(_RETRY)
                continue
            self.session = session
            self._attach(self._position)
            self._resize()
            return

    def _go_after(self, url: str, host: str) -> None:
        """Go on at another host, where the output broke off here."""
        self._moved = None
        if self._follow is None:
            self._ended = Ended("lost", text=f"it has moved to {host}: criuctl attach {url}")
            return
        self.session.leave()
        try:
            self._connect, self._patience = self._follow(url), _LINK_SECONDS
        except CriuctlError as error:
            self._ended = Ended("lost", text=f"it has moved to {host}, and {error.message}")
            return
        self._unanswered.clear()
        deadline = time.monotonic() + _FOLLOW_SECONDS
        while self._ended is None:
            try:
                self.session = self._connect(None)
            except CriuctlError as error:
                if time.monotonic() >= deadline:
                    self._ended = Ended("lost", text=f"it has moved to {host}, and {error.message}: criuctl attach {url}")
                    return
                self._pause(_RETRY)
                continue
            self._lease = None
            if self._position:
                self._attach(self._position)
                self._resize()
            else:
                self._begin()
            status = self.session.hello["status"]
            self._notice(f"criuctl: moved to {host}, {self.name} is incarnation {status['incarnation']}")
            return

    def _pause(self, seconds: float) -> None:
        """Wait for the next attempt; the detach key works meanwhile."""
        poll = select.poll()
        poll.register(self._terminal.stdin, select.POLLIN)
        if poll.poll(seconds * 1000):
            self._read_keyboard()
            time.sleep(0.01)


def replay(session: Session, status: dict[str, Any]) -> Any:
    """The screen that the log shows, as far back as is needed; its ``end`` is the offset behind what it has seen."""
    from .screen import Screen

    end, base, modes = status["offset"], status["base"], status["modes"]
    start = max(base, end - REPLAY)
    since = modes.get("alternate_since")
    if since is not None and base <= since < start:
        start = since if end - since <= _REPLAY_MAX else max(base, end - _REPLAY_MAX)
    output = session.read(start, end)
    screen = Screen(status["cols"], status["rows"])
    data = output.data
    if output.offset not in (0, since):
        data = data[data.find(b"\n") + 1 :]  # the middle of a line may be the middle of a sequence
    screen.feed(data)
    screen.end = output.end
    return screen


def restored_text(name: str, incarnation: int, restored: dict[str, Any]) -> str:
    """The banner: which incarnation, from where, how old, what was dropped."""
    text = f"{name}: restored, incarnation {incarnation}"
    if restored.get("host"):
        text += f", from {restored['host']}"
    if restored.get("created"):
        text += f", as it was {restored['created']}{_age(str(restored['created']))}"
    dropped = restored.get("dropped") or []
    if dropped:
        text += f"; dropped: {', '.join(map(str, dropped))}"
    return text


def _age(created: str) -> str:
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds())
    except (ValueError, TypeError):
        return ""
    for span, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * span or span == 1:
            return f" ({seconds // span} {unit} ago)"
    return ""


def _size(size: tuple[int, int, int, int]) -> dict[str, int]:
    return {"rows": size[0], "cols": size[1], "xpixel": size[2], "ypixel": size[3]}


def _is_report(data: bytes) -> bool:
    """Whether a terminal says this by itself: an answer to a query, a change of focus, the mouse."""
    import re

    return re.fullmatch(rb"(?:\x1b\[[?>=<]?[0-9;:]*[cRnytuIOMm]|\x1b[\]P][^\x07\x1b]*(?:\x07|\x1b\\))+", data) is not None


def say(text: str) -> None:
    """One line about the attachment itself, beside the session's output."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        os.write(2, f"[{text}]\n".encode())

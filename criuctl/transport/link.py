"""A link: requests, answers and events between two criuctl over one pair of byte streams.  This text is its specification.

Either side may ask, from any thread, many at once; answers come in any order.  A side that asks while it answers does no harm.

**Frames.**  Each direction is a sequence of frames: a header of 24 bytes (big-endian), JSON (UTF-8, a mapping, 8 MiB at most),
a body (raw, 64 MiB at most)::

    0  magic    4   93 'C' 'R' 'L'
    4  kind     1   1 hello, 2 ask, 3 answer, 4 error, 5 tell, 6 ping, 7 bye; three zero bytes follow
    8  request  8   number of the ask, chosen by who asks, its answer's likewise; 0 in the other kinds
    16 json     4   length
    20 body     4   length; only ask and answer have one

======  =====================================================================================================
hello   first in each direction: ``protocol: [oldest, newest]``, ``criuctl``: the version, ``timeout``: seconds of silence
        that its sender bears, ``window``: asks that the other side may have unanswered at a time; and facts of the callers
ask     ``verb``, ``arguments``, body
answer  ``arguments``, body
error   ``code, exit_code, message, hint, details`` of a `CriuctlError`, raised on the other side as the same class;
        or ``bug, message[, traceback]`` of any other exception
tell    ``verb``, ``arguments``; nothing comes back.  Events are handled one after the other, in their order
ping    empty
bye     ``reason``: the sender ends the link on purpose
======  =====================================================================================================

**Versions.**  Both sides use the highest protocol that both know.  Magic, header, hello and bye are the same in all of them.

**Life.**  Any byte is a sign of life.  Who has sent nothing for a sixth of the smaller time-out, pings.  A side that hears
nothing for its time-out, reads the end of the stream, or meets what the protocol has not, takes the link for lost, for ever.
Frames without bodies go first, but none interrupts another.

**Loss.**  When the link is lost, every ask under way raises `LinkLost`: the other side may have done it, or not.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from .. import __version__
from ..errors import CriuctlError, LinkLost, TimedOut, UnsupportedFormat
from . import frames
from .desk import Desk
from .frames import Broken, Data
from .messages import Answer, Buffers, Handler, Outgoing, Request, Waiting
from .streams import Cut, Inward, Outward, Silent, Stopped, prepare

__all__ = ["Answer", "Handler", "Link", "Request"]

PROTOCOL = (1, 1)  # oldest and newest that this criuctl speaks
_BANNER = 0.5  # seconds in which what is no protocol may finish its sentence
_SCRATCH = 256 << 10


class Link:
    """One end of a link.  It owns the descriptors `reading` and `writing`, and closes them."""

    def __init__(
        self,
        reading: int,
        writing: int,
        serve: Handler | None = None,
        *,
        workers: int = 8,
        timeout: float = 30.0,
        patience: float | None = None,
        name: str = "the other side",
        facts: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> None:
        """`serve` answers what the other side asks, in `workers` threads.

        The other side is called `name` in errors.  It may be silent for `timeout` seconds, and take `patience` to say hello.
        `facts` go with our hello.  With `debug` the traceback of a bug travels too.
        """
        if reading == writing:
            writing = os.dup(reading)
        for fd in (reading, writing):
            prepare(fd)
        self.name = name
        self.lost = threading.Event()
        self._timeout = timeout
        self._facts = dict(facts or {})
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._in = Inward(reading, self._wake, timeout if patience is None else patience)
        self._out = Outward(writing, self._wake)
        self._desk = Desk(serve, workers, self._queue, debug=debug)
        self._buffers = Buffers()
        self._interval = timeout / 6
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the writer has something to do
        self._room = threading.Condition(self._lock)  # one more may be asked
        self._gone = threading.Condition(self._lock)  # a frame is sent
        self._greeted = threading.Event()
        self._hello: dict[str, Any] | None = None
        self._window = 0
        self._number = 0
        self._asked: dict[int, Waiting] = {}
        self._first: deque[Outgoing] = deque()
        self._bulk: deque[Outgoing] = deque()
        self._sending: Outgoing | None = None
        self._failure: CriuctlError | None = None
        self._farewell = ""
        self._closing = False
        self._callbacks: list[Callable[[CriuctlError], None]] = []
        self._threads: list[threading.Thread] = []

    # -- for both sides ------------------------------------------------------------------------------

    def start(self) -> None:
        """Say hello and begin to listen.  Returns at once; `hello` waits for the other side's."""
        said = {
            **self._facts,
            "protocol": list(PROTOCOL),
            "criuctl": __version__,
            "timeout": self._timeout,
            "window": self._desk.window,
        }
        self._first.appendleft(Outgoing(frames.encode(frames.HELLO, 0, said)))
        self._in.heard = time.monotonic()
        for work, name in ((self._read, "reader"), (self._write, "writer")):
            self._threads.append(threading.Thread(target=work, name=f"criuctl-link-{name}", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def hello(self) -> dict[str, Any]:
        """What the other side said of itself; waits for it.  `LinkLost`, `UnsupportedFormat`."""
        self._greeted.wait()
        if self._hello is None:
            raise self._error()
        return self._hello

    def ask(
        self,
        verb: str,
        arguments: Mapping[str, Any] | None = None,
        body: Data = b"",
        *,
        into: memoryview | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Ask and wait for the answer, for ever unless the link is lost, or `timeout` seconds: `TimedOut`.

        `body` must not change until this returns.  The answer's body goes to the beginning of `into`, if given.
        Raises what the other side's handler raised, and `LinkLost`; after that and `TimedOut` it may have been done or not.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._greeted.wait(timeout):
            raise TimedOut(f"{self.name} has not said hello after {timeout:g} s")
        views = frames.encode(frames.ASK, 1, {"verb": verb, "arguments": dict(arguments or {})}, body)
        waiting = Waiting(into.cast("B") if into is not None else None)
        outgoing = Outgoing(views, len(views) > 1)
        number = 0
        try:
            with self._lock:
                while self._failure is None and not self._closing and len(self._asked) >= self._window:
                    if not self._room.wait(_left(deadline)):
                        raise TimedOut(f"{self.name} has too much to do: {verb} could not even be asked after {timeout:g} s")
                if self._failure is not None or self._closing:
                    raise self._error()
                self._number += 1
                number = self._number
                _renumber(views, number)
                self._asked[number] = waiting
                self._put(outgoing)
            waiting.done.wait(_left(deadline))
            if not waiting.done.is_set():
                raise TimedOut(f"{self.name} has not answered {verb} after {timeout:g} s")
        except BaseException:
            self._abandon(number, waiting, outgoing)
            raise
        if waiting.error is not None:
            raise waiting.error
        assert waiting.answer is not None
        return waiting.answer

    def tell(self, verb: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Send an event.  Returns at once; `LinkLost` if it is known that it cannot arrive."""
        outgoing = Outgoing(frames.encode(frames.TELL, 0, {"verb": verb, "arguments": dict(arguments or {})}))
        with self._lock:
            if self._failure is not None or self._closing:
                raise self._error()
            self._put(outgoing)

    def on_lost(self, callback: Callable[[CriuctlError], None]) -> None:
        """Call `callback` with the reason when the link is lost (at once if it is), in a thread of ours; not when we close it."""
        with self._lock:
            if self._failure is None:
                self._callbacks.append(callback)
                return
            failure = self._failure
        if not self._closing:
            callback(failure)

    def close(self, grace: float = 2.0) -> None:
        """End the link: our asks raise `LinkLost`; what is being answered has `grace` seconds to be finished and sent."""
        with self._lock:
            first = not self._closing
            self._closing = True
            waiting = self._take_asked()
            self._room.notify_all()
        for one in waiting:
            one.error = self._error()
            one.done.set()
        if not first:
            return
        deadline = time.monotonic() + grace
        if self._threads and self._failure is None:
            self._desk.settle(grace)
            with self._lock:
                self._farewell = self._farewell or "it is done"
                self._work.notify_all()
            _reader, writer = self._threads
            if threading.current_thread() not in self._threads:
                writer.join(max(0.0, deadline - time.monotonic()))
        self._fail(self._error())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        if not self._threads:
            self._in.close()
            self._out.close()
        if threading.current_thread() not in self._threads:
            os.close(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- sending -------------------------------------------------------------------------------------

    def _put(self, outgoing: Outgoing) -> None:
        """With the lock held."""
        (self._bulk if outgoing.large else self._first).append(outgoing)
        self._work.notify()

    def _queue(self, outgoing: Outgoing) -> None:
        """An answer; nobody wants it any more if the link is lost."""
        with self._lock:
            if self._failure is None:
                self._put(outgoing)
                return
        if outgoing.after is not None:
            outgoing.after()

    def _next(self) -> Outgoing | None:
        """The next frame, a ping when there is none for long, None at the end."""
        with self._lock:
            self._sending = None
            self._gone.notify_all()
            while not self._first and not self._bulk and self._failure is None and not self._farewell:
                if not self._work.wait(self._interval):
                    self._first.append(Outgoing(frames.encode(frames.PING, 0)))
            if self._failure is None and (self._first or self._bulk):
                self._sending = self._first.popleft() if self._first else self._bulk.popleft()
            return self._sending

    def _write(self) -> None:
        try:
            while (outgoing := self._next()) is not None:
                self._out.send(outgoing.views)
                if outgoing.after is not None:
                    outgoing.after()
                del outgoing
            if self._farewell:
                self._out.stopped = False
                self._out.send(frames.encode(frames.BYE, 0, {"reason": self._farewell}), 0)
        except Cut as cut:
            # The other side's last words may still be on their way to our reader: they tell more.
            self.lost.wait(1.0)
            self._fail(self._cut(cut))
        except Stopped:
            pass
        finally:
            with self._lock:
                self._sending = None
                self._gone.notify_all()
            self._out.close()

    def _abandon(self, number: int, waiting: Waiting, outgoing: Outgoing) -> None:
        """Nobody waits for this answer any more: its buffers are the caller's again when this returns."""
        waiting.abandon()
        try:
            with self._lock:
                for line in (self._first, self._bulk):
                    if outgoing in line:
                        line.remove(outgoing)
                        self._asked.pop(number, None)
                        self._room.notify()
                while self._sending is outgoing and self._failure is None:
                    self._gone.wait()
        except BaseException:  # interrupted once more: a frame in the middle of which the buffer may change must not arrive
            self._fail(LinkLost(f"the link with {self.name} was given up in the middle of a message"))
            raise

    # -- receiving -----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._greet()
            header = memoryview(bytearray(frames.HEADER.size))
            while True:
                self._in.fill(header)
                self._take(*frames.decode_header(header))
        except Cut as cut:
            self._fail(self._cut(cut))
        except Silent:
            seconds = time.monotonic() - self._in.heard
            self._fail(LinkLost(f"nothing was heard from {self.name} for {seconds:.0f} s", hint="Is it up, and the network?"))
        except Broken as broken:
            self._fail(LinkLost(f"{self.name} broke the protocol: {broken}"), f"you broke the protocol: {broken}")
        except CriuctlError as error:
            self._fail(error, error.message)
        except Stopped:
            pass
        except Exception as error:  # else all who wait would wait for ever
            self._fail(LinkLost(f"the link with {self.name} failed: {type(error).__name__}: {error}"), "a bug")
            raise
        finally:
            self._in.close()

    def _greet(self) -> None:
        """The other side's hello; what is said in its place is told."""
        header = memoryview(bytearray(frames.HEADER.size))
        done = 0
        while done < header.nbytes:
            if not (count := self._in.try_some(header[done:])):
                self._in.wait()
            done += count
            if not frames.MAGIC.startswith(header[: min(done, 4)]):
                raise self._babble(bytes(header[:done]))
        kind, _request, text, _body = frames.decode_header(header)
        if kind != frames.HELLO:
            raise Broken("it did not say hello")
        said = self._json(text)
        theirs, window, timeout = said.get("protocol"), said.get("window"), said.get("timeout")
        if not isinstance(theirs, list) or len(theirs) != 2 or not all(type(version) is int for version in theirs):
            raise Broken("its hello names no protocol")
        if type(window) is not int or not 1 <= window <= 4096:
            raise Broken("its hello names no window")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e6:
            raise Broken("its hello names no time-out")
        if min(PROTOCOL[1], theirs[1]) < max(PROTOCOL[0], theirs[0]):
            version = str(said.get("criuctl"))[:40]
            raise UnsupportedFormat(
                f"criuctl {version} on {self.name} speaks protocols {theirs[0]} to {theirs[1]}, "
                f"criuctl {__version__} here {PROTOCOL[0]} to {PROTOCOL[1]}",
                hint="Install the same version of criuctl on both hosts.",
            )
        with self._lock:
            self._window = window
            self._interval = min(self._timeout, timeout) / 6
            self._work.notify()  # the interval may be shorter now
        self._in.patience = self._timeout
        self._hello = said
        self._greeted.set()

    def _babble(self, said: bytes) -> CriuctlError:
        """What is no hello, as far as it comes soon: a login script's greeting, an error of the shell."""
        buffer = memoryview(bytearray(400))
        ends = time.monotonic() + _BANNER
        with contextlib.suppress(Cut, Silent):
            while len(said) < 400 and time.monotonic() < ends:
                count = self._in.try_some(buffer)
                said += bytes(buffer[:count])
                if not count:
                    self._in.wait(max(0.0, ends - time.monotonic()))
        text = " ".join("".join(c if c.isprintable() else " " for c in said.decode(errors="replace")).split())
        return LinkLost(
            f"{self.name} said {text[:300]!r}: not criuctl's protocol",
            hint="Login scripts there (~/.bashrc) must print nothing when there is no terminal; the command must be criuctl.",
        )

    def _take(self, kind: int, number: int, text: int, length: int) -> None:
        """The rest of one frame, to whom it is for."""
        if kind == frames.PING:
            return
        if kind == frames.HELLO:
            raise Broken("it said hello twice")
        said = self._json(text)
        if kind == frames.ASK:
            body, done = self._buffers.take(length)
            self._in.fill(body)
            request = Request(frames.text_of(said, "verb"), frames.mapping_of(said, "arguments"), body)
            self._desk.ask(number, request, done)
        elif kind == frames.TELL:
            self._desk.tell(Request(frames.text_of(said, "verb"), frames.mapping_of(said, "arguments"), event=True))
        elif kind == frames.BYE:
            raise LinkLost(f"{self.name} ended the link: {frames.text_of(said, 'reason')[:500]}")
        else:
            self._answered(kind, number, said, length)

    def _json(self, length: int) -> dict[str, Any]:
        text = memoryview(bytearray(length))
        self._in.fill(text)
        return frames.decode_json(text)

    def _answered(self, kind: int, number: int, said: dict[str, Any], length: int) -> None:
        with self._lock:
            waiting = self._asked.get(number)
        if waiting is None:
            if self._closing:
                raise Stopped
            raise Broken("it answered what was not asked")
        answer, error = None, None
        if kind == frames.ERROR:
            error = frames.decode_error(said, self.name)
        else:
            body = self._body(waiting, length)
            if body is None:
                error = LinkLost(f"{self.name} answered with {length} bytes, more than were asked for")
            answer = Answer(frames.mapping_of(said, "arguments"), body or b"")
        with self._lock:
            self._asked.pop(number, None)
            self._room.notify()
        if not waiting.done.is_set():
            waiting.answer, waiting.error = answer, error
            waiting.done.set()

    def _body(self, waiting: Waiting, length: int) -> memoryview | None:
        """An answer's body, where it is wanted; None if there is no room for it."""
        if not waiting.placed:
            memory = memoryview(bytearray(length))
            self._in.fill(memory)
            return memory
        with waiting.lock:
            fits = waiting.into is not None and length <= waiting.into.nbytes
            place = waiting.into[:length] if fits and waiting.into is not None else None
        scratch = memoryview(bytearray(min(length, _SCRATCH)))
        done = 0
        while done < length:
            with waiting.lock:  # once it is abandoned, the buffer is its owner's again
                wanted = fits and waiting.into is not None and place is not None
                count = self._in.try_some(place[done:] if wanted and place is not None else scratch[: length - done])
            if not count:
                self._in.wait()
            done += count
        return place

    # -- the end -------------------------------------------------------------------------------------

    def _cut(self, cut: Cut) -> LinkLost:
        how = f" ({cut})" if str(cut) else ""
        return LinkLost(f"the link with {self.name} was cut{how}")

    def _error(self) -> CriuctlError:
        """Why there is no link, as an error of the caller's own."""
        failure = self._failure or LinkLost(f"the link with {self.name} is closed")
        return type(failure)(failure.message, hint=failure.hint)

    def _take_asked(self) -> list[Waiting]:
        """With the lock held."""
        waiting = list(self._asked.values())
        self._asked.clear()
        return waiting

    def _fail(self, error: CriuctlError, farewell: str = "") -> None:
        """The link is over, for the reason that is told first."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            self._farewell = farewell or self._farewell
            waiting = self._take_asked()
            waste = [*self._first, *self._bulk]
            self._first.clear()
            self._bulk.clear()
            callbacks = [] if self._closing else self._callbacks
            self._in.stopped = self._out.stopped = True
            for condition in (self._work, self._room, self._gone):
                condition.notify_all()
        os.eventfd_write(self._wake, 1)
        for outgoing in waste:
            if outgoing.after is not None:
                outgoing.after()
        for one in waiting:
            if not one.done.is_set():
                one.error = self._error()
                one.done.set()
        self._desk.close()
        self._greeted.set()
        self.lost.set()
        for callback in callbacks:
            callback(error)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _renumber(views: list[memoryview], number: int) -> None:
    """Give an encoded ask its number, which is known only when it may be sent."""
    header = bytearray(views[0])
    header[8:16] = number.to_bytes(8, "big")
    views[0] = memoryview(header)

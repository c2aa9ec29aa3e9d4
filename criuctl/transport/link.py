"""A link: requests, answers and events between two criuctl processes over a pair of byte streams.

This text is its specification.  Either side may ask, from any thread, many requests at once;
answers come in any order.  A side may ask while it answers.

**Frames.**  Each direction is a sequence of frames: a header of 24 bytes (big-endian), JSON (UTF-8,
a mapping, 64 MiB at most), a body (raw, 64 MiB at most)::

    offset  field    bytes  content
    0       magic    4      93 'C' 'R' 'L'
    4       kind     1      1 hello, 2 ask, 3 answer, 4 error, 5 tell, 6 ping, 7 bye;
                            three zero bytes follow
    8       request  8      number of the ask, chosen by the asking side, and of its answer;
                            0 in the other kinds
    16      json     4      length
    20      body     4      length; only ask and answer have one

The JSON and the body of each kind:

- ``hello``, first in each direction: ``protocol: [oldest, newest]``; ``criuctl``: the version;
  ``timeout``: seconds of silence that its sender accepts; ``window``: requests that the other side
  may have unanswered at a time; and facts of the callers.
- ``ask``: ``verb``, ``arguments``, body.
- ``answer``: ``arguments``, body.
- ``error``: ``code, exit_code, message, hint, details`` of a `CriuctlError`, raised on the other
  side as the same class; or ``bug, message[, traceback]`` of any other exception.
- ``tell``: ``verb``, ``arguments``; an event, without an answer.  Events are handled one after the
  other, in their order.
- ``ping``: empty.
- ``bye``: ``reason``; the sender ends the link on purpose.

**Versions.**  Both sides use the highest protocol that both support.  Magic, header, hello and bye
are the same in all of them.

**Keep-alive.**  Any byte shows that the sender is alive.  A side that has sent nothing for a sixth
of the smaller time-out sends a ping.  A side that receives nothing for its time-out, reads the end
of the stream, or receives a violation of the protocol regards the link as lost, for ever.  Frames
without bodies go first, but none interrupts another.

**Loss.**  When the link is lost, every pending request raises `LinkLost`: the other side may have
done it, or not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from ..errors import CriuctlError, LinkLost, TimedOut
from . import frames
from .dispatcher import Dispatcher
from .frames import Broken, Data
from .greeting import Hello, our_hello, their_hello
from .messages import Answer, Buffers, Handler, Outgoing, Request, Waiting
from .sender import Sender
from .streams import Cut, Inward, Outward, Silent, Stopped, prepare

__all__ = ["Answer", "Handler", "Link", "Request"]

_PINGS = 6  # per time-out
_WINDOW = 2  # requests of the other side under way, for each worker
_SCRATCH = 256 << 10
_LAST_FRAME_WAIT = 1.0  # seconds for the other side's reason to arrive when we can no longer send


class Link:
    """One end of a link. It owns the descriptors `reading` and `writing`, and closes them."""

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
        """`serve` answers requests in `workers` threads, and takes events in another one.

        `name` is the other side in errors. It may be silent for `timeout` seconds, and take
        `patience` to say hello. `facts` go with our hello. With `debug` the traceback of a bug is
        sent too.
        """
        if reading == writing:
            writing = os.dup(reading)
        for fd in (reading, writing):
            prepare(fd)
        self.name = name
        self.lost = threading.Event()  # for whatever reason, `close` included
        self._timeout = timeout
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._in = Inward(reading, self._wake, timeout if patience is None else patience)
        self._out = Outward(writing, self._wake)
        self._buffers = Buffers()
        window = _WINDOW * workers
        self._sender = Sender(
            self._out, our_hello(facts or {}, timeout, window), timeout / _PINGS, self._broke
        )
        self._dispatcher = Dispatcher(serve, workers, window, self._sender.put, debug=debug)
        self._greeted = threading.Event()
        self._hello: Hello | None = None
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # for one more request
        self._number = 0
        self._asked: dict[int, Waiting] = {}
        self._failure: CriuctlError | None = None
        self._closing = False
        self._callbacks: list[Callable[[CriuctlError], None]] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Send hello and begin to receive. Returns at once; `hello` waits for the other side's."""
        self._in.last_received = time.monotonic()
        for work, name in ((self._read, "reader"), (self._sender.run, "writer")):
            self._threads.append(
                threading.Thread(target=work, name=f"criuctl-link-{name}", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    @property
    def hello(self) -> dict[str, Any]:
        """Return the other side's hello; waits for it. `LinkLost`, `UnsupportedFormat`."""
        return self._await_hello().said

    @property
    def protocol(self) -> int:
        """The version that both use; waits for the hello."""
        return self._await_hello().protocol

    def ask(
        self,
        verb: str,
        arguments: Mapping[str, Any] | None = None,
        body: Data = b"",
        *,
        into: memoryview | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request and wait for the answer, while the link lives or for `timeout` seconds.

        `body` must not change until this returns. The answer's body goes to the beginning of
        `into`, if given. Raises what the other side's handler raised, `TimedOut` and `LinkLost`;
        after the last two the request may have been done or not.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        hello = self._await_hello(timeout)
        views = frames.encode(
            frames.ASK, 0, {"verb": verb, "arguments": dict(arguments or {})}, body
        )
        waiting, outgoing, number = Waiting(into), Outgoing(views), 0
        try:
            with self._lock:
                while not self._over() and len(self._asked) >= hello.window:
                    if not self._room.wait(_left(deadline)):
                        raise TimedOut(
                            f"{self.name} is too busy: it did not accept the request "
                            f"({verb}) for {timeout:g} s"
                        )
                if self._over():
                    raise self._error()
                self._number += 1
                number = self._number
                views[0] = frames.numbered(views[0], number)
                self._asked[number] = waiting
                self._sender.put(outgoing)
            if not waiting.done.wait(_left(deadline)):
                raise TimedOut(f"{self.name} has not answered ({verb}) for {timeout:g} s")
        except BaseException:
            self._abandon(number, waiting, outgoing)
            raise
        return waiting.result()

    def tell(self, verb: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Send an event.

        Returns at once; `LinkLost` if it is known already that it cannot arrive.
        """
        outgoing = Outgoing(
            frames.encode(frames.TELL, 0, {"verb": verb, "arguments": dict(arguments or {})})
        )
        with self._lock:
            if self._over():
                raise self._error()
            self._sender.put(outgoing)

    def on_lost(self, callback: Callable[[CriuctlError], None]) -> None:
        """Call `callback` with the reason, in a new thread, when the link is lost or if it is
        already.

        Not after `close`.
        """
        with self._lock:
            if self._failure is None:
                self._callbacks.append(callback)
                return
        if not self._closing:
            _call([callback], self._failure)

    def close(self, grace: float = 2.0, reason: str = "it is done") -> None:
        """End the link, giving the other side `reason`; never from a handler.

        Our pending requests raise `LinkLost`; handlers at work have `grace` seconds to finish and
        send.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            waiting = self._take_asked()
            self._room.notify_all()
        for one in waiting:
            one.settle(error=self._error())
        if self._threads and self._failure is None:
            deadline = time.monotonic() + grace
            self._dispatcher.settle(grace)
            self._sender.finish(reason)
            self._threads[-1].join(max(0.0, deadline - time.monotonic()))
        self._fail(self._error())
        for thread in self._threads:
            thread.join()
        if not self._threads:
            self._in.close()
            self._out.close()
        os.close(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- asking ------------------------------------------------------------------------------------

    def _await_hello(self, timeout: float | None = None) -> Hello:
        if not self._greeted.wait(timeout):
            raise TimedOut(f"{self.name} has not said hello for {timeout:g} s")
        if self._hello is None:
            raise self._error()
        return self._hello

    def _abandon(self, number: int, waiting: Waiting, outgoing: Outgoing) -> None:
        """Give up an answer: its buffers are the caller's again when this returns."""
        waiting.abandon()
        try:
            if self._sender.withdraw(outgoing):
                with self._lock:
                    self._asked.pop(number, None)
                    self._room.notify()
        # interrupted again: a frame whose buffer may change before all of it is sent must not
        # arrive
        except BaseException:
            self._fail(
                LinkLost(f"the link with {self.name} was given up in the middle of a message")
            )
            raise

    # -- receiving ---------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            hello = their_hello(self._in, self.name)
            self._in.patience = self._timeout
            self._sender.hurry(min(self._timeout, hello.timeout) / _PINGS)
            self._hello = hello
            self._greeted.set()
            header = memoryview(bytearray(frames.HEADER.size))
            while True:
                self._in.fill(header)
                self._take(*frames.decode_header(header))
        except Cut as cut:
            self._fail(self._cut(cut))
        except Silent:
            seconds = time.monotonic() - self._in.last_received
            self._fail(
                LinkLost(
                    f"nothing was received from {self.name} for {seconds:.0f} s",
                    hint="Is it up, and the network?",
                )
            )
        except Broken as broken:
            self._fail(
                LinkLost(f"{self.name} broke the protocol: {broken}"),
                f"you broke the protocol: {broken}",
            )
        except CriuctlError as error:
            self._fail(error, error.message)
        except Stopped:
            pass
        except Exception as error:  # else all waiting callers would wait for ever
            self._fail(
                LinkLost(f"the link with {self.name} failed: {type(error).__name__}: {error}"),
                "a bug",
            )
            raise
        finally:
            self._in.close()

    def _take(self, kind: int, number: int, length: int, body_length: int) -> None:
        """Read the rest of one frame and pass it on."""
        if kind == frames.PING:
            return
        if kind == frames.HELLO:
            raise Broken("it said hello twice")
        text = memoryview(bytearray(length))
        self._in.fill(text)
        said = frames.decode_json(text)
        if kind == frames.ASK:
            self._dispatcher.expect(number)
            body, done = self._buffers.take(body_length)
            self._in.fill(body)
            self._dispatcher.ask(
                number,
                Request(frames.text_of(said, "verb"), frames.mapping_of(said, "arguments"), body),
                done,
            )
        elif kind == frames.TELL:
            self._dispatcher.tell(
                Request(
                    frames.text_of(said, "verb"), frames.mapping_of(said, "arguments"), event=True
                ),
                length,
            )
        elif kind == frames.BYE:
            raise LinkLost(f"{self.name} ended the link: {frames.text_of(said, 'reason')[:500]}")
        else:
            self._answered(kind, number, said, body_length)

    def _answered(self, kind: int, number: int, said: dict[str, Any], length: int) -> None:
        with self._lock:
            waiting = self._asked.get(number)
            if waiting is None and not self._closing:
                raise Broken("it answered a request that was not made")
        if waiting is None:
            waiting = Waiting(memoryview(b""))  # given up by `close`
        if kind == frames.ERROR:
            answer, error = None, frames.decode_error(said, self.name)
        else:
            body = self._body(waiting, length)
            answer, error = Answer(frames.mapping_of(said, "arguments"), body or b""), None
            if body is None:
                error = frames.OtherSideFailed(
                    f"{self.name} answered with {length} bytes, more than were requested"
                )
        with self._lock:
            self._asked.pop(number, None)
            self._room.notify()
        waiting.settle(answer, error)

    def _body(self, waiting: Waiting, length: int) -> memoryview | None:
        """Return the buffer for an answer's body; None if the body is too long for it."""
        if not waiting.placed:
            memory = memoryview(bytearray(length))
            self._in.fill(memory)
            return memory
        fits = length <= waiting.size
        scratch = memoryview(bytearray(min(length, _SCRATCH)))
        done = 0
        while done < length:
            with waiting.lock:  # once it is abandoned, the buffer is its owner's again
                wanted = waiting.into if fits else None
                count = self._in.try_some(
                    scratch[: length - done] if wanted is None else wanted[done:length]
                )
            if not count:
                self._in.wait()
            done += count
        with waiting.lock:
            return waiting.into[:length] if fits and waiting.into is not None else None

    # -- the end -----------------------------------------------------------------------------------

    def _broke(self, cut: Cut) -> None:
        """Handle a failure to send.

        The other side's last frame may still arrive, and explains more.
        """
        self.lost.wait(_LAST_FRAME_WAIT)
        self._fail(self._cut(cut))

    def _cut(self, cut: Cut) -> LinkLost:
        return LinkLost(f"the link with {self.name} was cut" + (f" ({cut})" if str(cut) else ""))

    def _over(self) -> bool:
        return self._closing or self._failure is not None

    def _error(self) -> CriuctlError:
        """Return why the link ended, as a new error for the caller."""
        failure = self._failure or self._closed()
        return type(failure)(failure.message, hint=failure.hint)

    def _closed(self) -> LinkLost:
        return LinkLost(f"the link with {self.name} is closed")

    def _take_asked(self) -> list[Waiting]:
        """Return the pending requests and remove them; with the lock held."""
        waiting = list(self._asked.values())
        self._asked.clear()
        return waiting

    def _fail(self, error: CriuctlError, farewell: str = "") -> None:
        """End the link, for the first reason that is given."""
        with self._lock:
            if self._failure is not None:
                return
            # a failure after our own close is no reason
            self._failure = self._closed() if self._closing else error
            waiting = self._take_asked()
            callbacks = [] if self._closing else self._callbacks
            self._room.notify_all()
        self._in.stopped = True
        self._sender.stop(farewell)
        os.eventfd_write(self._wake, 1)
        for one in waiting:
            one.settle(error=self._error())
        self._dispatcher.close()
        self._greeted.set()
        self.lost.set()
        _call(callbacks, error)


def _call(callbacks: list[Callable[[CriuctlError], None]], error: CriuctlError) -> None:
    def call() -> None:
        for callback in callbacks:
            callback(error)

    if callbacks:
        try:
            threading.Thread(target=call, name="criuctl-link-lost", daemon=True).start()
        # no thread can be started, and a caller without notice would wait for ever
        except RuntimeError:
            call()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())

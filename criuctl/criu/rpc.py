"""The swrk client: one private CRIU process, controlled over a SOCK_SEQPACKET pair.

CRIU is started as ``criu swrk FD`` (see `criuctl.criu.binary`) with one end of a socket pair; each
packet is one protobuf message (``images/rpc.proto`` in CRIU's sources). A dump or restore request
is answered by any number of NOTIFY messages, which must be acknowledged one by one, and at last by
one response of the request's own type. pycriu's own client has no notify loop and drops
``cr_errmsg``, hence this one; the message classes are pycriu's.

Another thread may send a negative answer while the caller works on its answer (`veto`).

CRIU ends by itself when its socket closes: during a dump it then lets the tree go on, during a
restore it kills what it had restored. A CRIU that dumps is never killed from here, because one
killed half way leaves parasites in the tree. One that restores is killed (`expendable`) if it
hangs: nothing of the tree has run. It is also killed when all that is left for it is to let go of
the tree (`end_tracer`).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import CriuctlError
from . import hang_detection, schema

Notify = Callable[[str, int], bool | Sequence[str]]
"""Called with (script name, PID or 0) at each notification; what it returns is CRIU's answer.

A list is a yes that adds external resources; CRIU takes them with ``query-ext-files`` only.
"""

_MAX_PACKET = 1 << 20


class CriuGone(CriuctlError):
    """CRIU ended without answering."""

    exit_code = 1
    code = "criu-gone"


class CriuRefused(CriuctlError):
    """CRIU answered that the request failed; the reason is in its log."""

    exit_code = 1
    code = "criu-refused"


class Swrk:
    """One session with one ``criu swrk``.

    `sock` is our end of the pair, `pid` its PID or that of its parent.
    """

    def __init__(self, sock: socket.socket, pid: int = 0) -> None:
        self.sock = sock
        self.pid = pid
        self.expendable = False  # what it has made so far may be killed, as nothing of it has run
        self.hangs = False  # it does nothing any more
        self._rpc = schema.rpc()
        self._ended: int | None = None  # its pidfd, readable when it has ended
        with suppress(OSError):  # it has ended already, or its parent is not there any more
            self._ended = os.pidfd_open(pid) if pid else None
        self._turn = threading.Lock()  # guards the fields below
        self._asks = False  # CRIU waits for the answer to a notification
        self._refused = False  # all answers are negative from now on

    def close(self) -> None:
        """Close the conversation, also for other processes that have our end of it."""
        with suppress(OSError):  # CRIU has ended already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        if self._ended is not None:
            os.close(self._ended)
            self._ended = None

    def refuse(self) -> None:
        """Make every answer negative from now on.

        Not at once: if CRIU waits for an answer, the caller gives it.
        """
        with self._turn:
            self._refused = True

    @property
    def asks(self) -> bool:
        """Whether CRIU waits for the answer to a notification."""
        return self._asks

    def veto(self) -> None:
        """Answer no at once, if CRIU waits for an answer; may be called from any thread."""
        with self._turn:
            self._refused = True
            if self._asks:
                self._asks = False
                with suppress(CriuGone):
                    self._reply(False)

    def call(
        self,
        kind: str,
        options: Any = None,
        notify: Notify | None = None,
        keep_open: bool = False,
        until: str | None = None,
    ) -> Any:
        """Send a request and see it through: `ask` and `answer`."""
        self.ask(kind, options, keep_open)
        return self.answer(notify, until)

    def ask(self, kind: str, options: Any = None, keep_open: bool = False) -> None:
        """Send one request ("DUMP", "RESTORE", "VERSION", ...).

        CRIU then waits at its first notification.
        """
        request = self._rpc.criu_req()
        request.type = getattr(self._rpc, kind)
        if options is not None:
            request.opts.CopyFrom(options)
        if keep_open:
            request.keep_open = True
        self._send(request)

    def answer(self, notify: Notify | None = None, until: str | None = None) -> Any:
        """See a request through and return CRIU's final response.

        With `until`, only up to that notification, for which CRIU gets no answer and at which it
        waits. An exception raised by `notify` is answered to CRIU as a veto, the request is seen
        through to its end (so that CRIU has rolled back), and then the exception is raised. Raises
        `CriuRefused` when CRIU refuses, `CriuGone` when it ended without an answer.
        """
        veto: BaseException | None = None
        while True:
            response = self._receive(veto)
            if response.type != self._rpc.NOTIFY:
                break
            script = response.notify.script
            if script == until and veto is None:
                return response
            pid = response.notify.pid if response.notify.HasField("pid") else 0
            accepted: bool | Sequence[str] = False
            with self._turn:
                self._asks, refused = True, self._refused
            if veto is None and not refused:
                try:
                    accepted = True if notify is None else notify(script, pid)
                # answered to CRIU first, raised when CRIU has rolled back
                except BaseException as error:
                    veto = error
            try:
                with self._turn:
                    if self._asks:  # else `veto` has answered
                        self._asks = False
                        self._reply(accepted if not self._refused else False)
            except CriuGone:
                if veto is not None:
                    raise veto from None
                raise
        if veto is not None:
            raise veto
        if not response.success:
            message = response.cr_errmsg.strip() if response.HasField("cr_errmsg") else ""
            raise CriuRefused(message or f"CRIU failed (errno {response.cr_errno})")
        return response

    def go_on(self) -> Any:
        """Acknowledge the notification at which CRIU waits, and see the request through."""
        self._reply(True)
        return self.answer()

    def _reply(self, accepted: bool | Sequence[str]) -> None:
        answer = self._rpc.criu_req()
        answer.type = self._rpc.NOTIFY
        answer.notify_success = accepted is not False
        if not isinstance(accepted, bool) and accepted:
            answer.opts.images_dir_fd = -1  # a required field of the message, unused here
            answer.opts.external.extend(accepted)
        self._send(answer)

    def _send(self, message: Any) -> None:
        try:
            self.sock.sendall(message.SerializeToString())
        except OSError as error:
            raise CriuGone(f"CRIU ended before the request: {error}") from error

    def _receive(self, veto: BaseException | None) -> Any:
        packet = b""
        if self._wait(veto):
            with suppress(ConnectionError):
                packet = self.sock.recv(_MAX_PACKET)
        if not packet:
            if veto is not None:
                raise veto
            raise CriuGone("CRIU ended without an answer")
        response = self._rpc.criu_resp()
        response.ParseFromString(packet)
        return response

    def _wait(self, veto: BaseException | None) -> bool:
        """Wait for CRIU's next message, or its end; return False when it has ended without one.

        The socket alone does not say that it has ended: a process that it had made to try out the
        kernel, and that waits to be killed by it, has the socket, too. An expendable CRIU that
        hangs raises `CriuGone`, or the `veto`.
        """
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        if self._ended is not None:
            poller.register(self._ended, select.POLLIN)
        watch = hang_detection.Watch(self.pid) if self.expendable else None
        self.hangs = False
        while not (ready := dict(poller.poll(hang_detection.LOOK * 1000 if watch else None))):
            assert watch is not None
            idle = watch.idle()
            self.hangs = idle > hang_detection.ROLLBACK
            if self.hangs and veto is not None:
                raise veto
            if idle > hang_detection.PATIENCE:
                raise CriuGone(f"CRIU has done nothing for {hang_detection.PATIENCE:g} s")
        # its last message may have come between the looks at the socket and at its end
        if self.sock.fileno() in ready or select.select([self.sock], [], [], 0)[0]:
            return True
        self._end_orphans()
        return False

    def _end_orphans(self) -> None:
        """SIGKILL the processes that a CRIU which was killed has left behind in its group.

        Nothing of a tree is among them: CRIU has nothing to do with those of a dump's tree but to
        trace them, and those of a restore are to end with it.
        """
        assert self._ended is not None
        with suppress(OSError):
            # Raises an error if it is not our child. Ours is not reaped yet: its number is no other
            # group's.
            os.waitid(os.P_PIDFD, self._ended, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signal.SIGKILL)


def end_tracer(pid: int) -> bool:
    """SIGKILL a CRIU that traces a tree and waits for our answer.

    Returns whether the kernel has released all that it traced.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        ended.poll()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True

"""The keeper of a share: a process in the background, from `share` to the share's end.

It has the rights of the user that shares, who is the session's: the holder lets no other user in.
It makes the keys, which no file and no argument has; keeps the tunnel; serves the guest; and writes
its account of that (`records`). The share ends, and its connections are cut, when its time is over,
when it is revoked (SIGTERM), and when its session ends or moves to another host. A session that is
restored on this host is the same session, and the share goes on with it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct, field

from ..config import Config, load
from ..errors import CriuctlError, SessionGone
from ..host.journal import events
from ..proc.tree import ProcessIdentity
from ..session.client.session import Event, Session
from ..session.names import socket_address
from ..transport import ssh
from . import records
from .admission import Admission
from .channel import Channels, holder_socket
from .invitation import Invitation, private_key, raw_key
from .records import REVOKED, Share
from .server import Server
from .tunnel import Tunnel

_LOOK = 0.5  # seconds between two looks at the clock
_OPENS = 40.0  # seconds for the tunnel to stand for the first time
_LAST_WORDS = 2.0  # seconds for a guest to see how the session ended
_REASON = 2.0  # seconds for the reason to pass through the tunnel; nothing else does by then
_HOLDER_BACK = 60.0  # seconds for a holder of the same session to come back
_MOST_LOGGED = 100  # lines
OPERATOR = "criuctl-share"  # the keeper's own connection to the holder
EXPIRED = "expired"


class Order(Struct):
    """What `share` asks of its keeper."""

    share: Share
    host: ssh.Host
    program: list[str]  # ssh
    seconds: float
    config_file: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


class Keeper:
    """One share."""

    def __init__(self, config: Config, order: Order) -> None:
        self._config, self._order = config, order
        share = self._share = order.share
        own = ProcessIdentity.of(os.getpid())
        share.pid, share.start_time = own.pid, own.start_time
        self._until = time.clock_gettime(time.CLOCK_BOOTTIME) + order.seconds
        self._folder = records.make(config, share)
        self._secret, self._seed = secrets.token_bytes(32), secrets.token_bytes(32)
        self._end = asyncio.Event()
        self._grace = 0.0
        self._server = Server(
            self._seed,
            Admission(raw_key(private_key(self._secret))),
            Channels(config, share).serve,
            self._changed,
        )
        self._tunnel = Tunnel(order.host, order.program, self._folder / "socket", self._changed)

    async def run(self, answer: socket.socket) -> None:
        """Keep the share to its end; `answer` gets the invitation, or why there is none."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._ends, REVOKED)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._end.wait())]
        made, why = False, ""
        try:
            session = await asyncio.to_thread(self._watched, None)
            tasks.append(asyncio.create_task(self._server.run(_listen(self._folder))))
            tasks.append(asyncio.create_task(self._tunnel.run()))
            await _first([*tasks, asyncio.create_task(self._tunnel.open(_OPENS))])
            line = self._invitation().line()
            if self._end.is_set() or not _tell(answer, {"line": line, "share": self._share}):
                return  # `share` was interrupted
            made = True
            self._record("made")
            self._secret = self._seed = b""  # the server has what it needs
            tasks.append(asyncio.create_task(self._watch(session)))
            tasks.append(asyncio.create_task(self._clock()))
            await _first(tasks)
            why = self._share.why
            await asyncio.sleep(self._grace)
        except Exception as error:
            why = f"its process failed: {error}"
            raise
        finally:
            self._server.cut(f"the share has ended: {why}")
            self._share.ended, self._share.why = time.time(), why
            await asyncio.sleep(_REASON if made else 0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(OSError):
                (self._folder / "socket").unlink()
            self._changed()
            if made:
                self._record("ended", why=why)
            else:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _invitation(self) -> Invitation:
        key = raw_key(private_key(self._seed))
        share = self._share
        return Invitation(share.host, share.port, share.id, key, self._secret)

    def _ends(self, why: str, grace: float = 0.0) -> None:
        if not self._end.is_set():
            self._share.why, self._grace = why, grace
            self._end.set()

    # -- what it reports --------------------------------------------------------------------------

    def _changed(self) -> None:
        share, tunnel = self._share, self._tunnel
        share.tunnel, share.trouble = "up" if tunnel.up else "connecting", tunnel.trouble
        share.port = tunnel.port
        before = share.guest
        if self._server.here:
            share.guest = "here"
        else:
            share.guest = "away" if self._server.admission.used and not share.ended else "none"
        with suppress(OSError):
            records.write(self._folder, share)
        if share.guest != before and share.guest == "here":
            self._record("guest")

    def _record(self, how: str, **more: Any) -> None:
        share = self._share
        facts = {"session": share.session, "share": share.id, "how": how, "role": share.role}
        events.record(self._config, "share", [facts | more])

    # -- what ends it -----------------------------------------------------------------------------

    async def _clock(self) -> None:
        while time.clock_gettime(time.CLOCK_BOOTTIME) < self._until:
            await asyncio.sleep(_LOOK)
        self._ends(EXPIRED)

    def _watched(self, before: Session | None) -> Session:
        """Return a connection to the holder, by which the session's end is seen; `SessionGone`."""
        share = self._share
        if before is not None:
            before.close()
        session = Session(
            holder_socket(self._config, share.session),
            kind="service",
            operator=OPERATOR,
            role="observe",
        )
        if session.hello["status"]["id"] != share.session_id:
            session.close()
            raise SessionGone("the session has ended; there is another one of its name")
        return session

    async def _watch(self, session: Session) -> None:
        """End the share with its session."""
        loop = asyncio.get_running_loop()
        while True:
            status = session.hello["status"]
            if status.get("moved_to"):
                return self._ends(_moved(str(status.get("home"))), _LAST_WORDS)
            if status["state"] in ("exited", "lost"):
                return self._ends("the session has ended", _LAST_WORDS)
            lost = loop.create_future()
            try:
                await asyncio.to_thread(session.subscribe)
                loop.add_reader(session.fileno(), self._read, session, lost)
                self._read(session, lost)
                await lost
            except CriuctlError:
                pass
            finally:
                loop.remove_reader(session.fileno())
            found = await self._back(session)
            if found is None:
                return self._ends("the session's holder is gone")
            session = found

    async def _back(self, session: Session) -> Session | None:
        """Return a connection to the next holder of the same session; None if none comes."""
        deadline = time.monotonic() + _HOLDER_BACK
        while time.monotonic() < deadline:
            with suppress(CriuctlError):
                return await asyncio.to_thread(self._watched, session)
            await asyncio.sleep(_LOOK)
        return None

    def _read(self, session: Session, lost: asyncio.Future[None]) -> None:
        try:
            while (message := session.receive(0)) is not None:
                if isinstance(message, Event):
                    self._on_event(message)
        except CriuctlError:
            asyncio.get_running_loop().remove_reader(session.fileno())
            if not lost.done():
                lost.set_result(None)

    def _on_event(self, event: Event) -> None:
        if event.name == "exit":
            self._ends("the session has ended", _LAST_WORDS)
        elif event.name == "moved":
            self._ends(_moved(str(event.body.get("host"))), _LAST_WORDS)


async def _first(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until one has ended, and raise its error: the others cannot do without it."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def _moved(host: str) -> str:
    return f"the session has moved to {host}; share it there"


def _listen(folder: Any) -> socket.socket:
    """Return the socket at the tunnel's end, which this user alone reaches."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        with socket_address(folder / "socket") as address:
            listener.bind(address)
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def _tell(answer: socket.socket, body: Any) -> bool:
    """Answer `share`; return False if it was killed meanwhile."""
    with answer:
        try:
            answer.sendall(msgspec.json.encode(body))
        except OSError:
            return False
    return True


def main() -> None:
    """Keep a share; the argument is the descriptor of the socket with the order."""
    answer = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(answer.fileno(), False)
    with answer.makefile("rb") as file:
        order = msgspec.json.decode(file.read(), type=Order)
    os.environ.update(order.environment)
    asyncio.run(_run(order, answer))


async def _run(order: Order, answer: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(_Log().note)
    try:
        config = load(order.config_file)
        await Keeper(config, order).run(answer)
    except CriuctlError as error:
        _tell(answer, {"error": error.to_dict()})
    except OSError as error:
        _tell(answer, {"error": {"message": f"{error.filename or ''}: {error.strerror}"}})


class _Log:
    """What goes wrong in connections of strangers, in the log, and not more than fits there."""

    def __init__(self) -> None:
        self._left = _MOST_LOGGED

    def note(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Write one line, for ``set_exception_handler``."""
        if self._left:
            self._left -= 1
            why = repr(context.get("exception"))[:300]
            os.write(2, f"{context.get('message')}: {why}\n".encode(errors="replace"))

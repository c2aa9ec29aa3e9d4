"""A store that another process accesses, see `criuctl.proc.early_process`.

boto3 takes longer to load than all else of a small dump, and while it signs and sends it holds the
interpreter that hashes and compresses. So another process loads it, in parallel with everything
that the command does before it needs the store, and makes all requests to the store.

Contents that lie in memory from `ProcessStore.memory` are not copied. A call that is interrupted
here goes on there, like one whose answer is lost: its connection is not used again, and what it
sends may by then be other content, under a name that no other process knows.

That process bounds the time of each request (`s3_deadline`). Should it be stopped itself, or hang
where nothing is bounded (in the resolver, for example), no call here waits for much longer than its
requests may take.
"""

from __future__ import annotations

import pickle
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from msgspec import Struct

from ..config import Config
from ..errors import CriuctlError, StoreError, StoreUnreachable
from ..proc.early_process import Connection, EarlyProcess, Shared
from ..proc.threads import Later
from . import open_store
from .base import Capabilities, Data, Keeping, ObjectInfo, Store, as_views

_LISTED = 1000  # objects in one answer
# requests per call, at most: creating a large object takes a check, sending, completing and another
# check
_REQUESTS = 4
_UNKNOWN = 64 << 20  # bytes of an object of unknown size
_SPARE = 30.0  # seconds for that process to load its modules
_SLOWEST = 32 << 10  # bytes a second, as in `s3_deadline`, which this process must not load


class ProcessStore(Store):
    """The store at `url`; its process does the work."""

    def __init__(self, url: str, config: Config, process: EarlyProcess) -> None:
        """Send the process the description of its store."""
        self.url = url
        self._patience = _REQUESTS * config.s3_deadline + _SPARE
        self._process = process
        self._ended = False
        self._idle = process.connections  # used from the end: its window has been touched
        self._changed = threading.Condition()
        self._left = len(self._idle)
        with suppress(OSError):  # it has ended, as the first call will report
            process.control.send((url, config))

    def memory(self, size: int) -> memoryview:
        taken = self._process.shared.take(size)
        return taken if taken is not None else super().memory(size)

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        views = as_views(data)
        places = [self._process.shared.place(view) for view in views]
        sent = [view for view, place in zip(views, places, strict=True) if place is None]
        sizes = [
            place if place is not None else view.nbytes
            for view, place in zip(views, places, strict=True)
        ]
        self._ask("put", name, sizes, if_absent, body=sent, size=sum(view.nbytes for view in views))

    def get(self, name: str, limit: int | None = None) -> bytes:
        content: bytes = self._ask("get", name, limit, size=limit or _UNKNOWN)
        return content

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        content: bytes = self._ask("get_range", name, offset, length, size=length)
        return content

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        target = buffer.cast("B")
        place = self._process.shared.place(target)
        self._ask(
            "read_into",
            name,
            offset,
            place if place is not None else target.nbytes,
            into=target,
            size=target.nbytes,
        )

    def stat(self, name: str) -> ObjectInfo:
        found: ObjectInfo = self._ask("stat", name)
        return found

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._connection() as connection:
            connection.patience(self._patience)
            found = self._call(connection, "list", prefix)
            while found:
                try:
                    yield from found
                except GeneratorExit:  # the caller has closed the iterator
                    self._call(connection, "enough")
                    return
                found = self._call(connection, "more")

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def create(self) -> None:
        self._ask("create")

    def probe(self) -> Capabilities:
        found: Capabilities = self._ask("probe")
        return found

    def check_writable(self) -> None:
        self._ask("check_writable")

    def place(self) -> str:
        return str(self._ask("place"))

    def sweep(self, older_than: float) -> int:
        return int(self._ask("sweep", older_than))

    def keeping(self) -> Keeping | None:
        found: Keeping | None = self._ask("keeping")
        return found

    def close(self) -> None:
        """End the process, with the work that interrupted calls have left it.

        The code that announced the store reaps it.
        """
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._left = 0
            self._changed.notify_all()
        self._process.close()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    # -- requests ----------------------------------------------------------------------------------

    def _ask(
        self,
        verb: str,
        *arguments: object,
        body: Sequence[memoryview] = (),
        into: memoryview | None = None,
        size: int = 0,
    ) -> Any:
        with self._connection() as connection:
            connection.patience(self._patience + _REQUESTS * size / _SLOWEST)
            return self._call(connection, verb, *arguments, body=body, into=into)

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """Yield a connection for one call.

        After an invalid answer, or one that was not awaited, it is not used again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._idle or not self._left)
            if not self._left:
                raise self._lost()
            connection = self._idle.pop()
        kept = False
        try:
            yield connection
            kept = True
        except CriuctlError as error:
            kept = not isinstance(error, _Lost)
            raise
        finally:
            with self._changed:
                if kept and not self._ended:
                    self._idle.append(connection)
                else:
                    self._left = max(self._left - 1, 0)
                    connection.close()
                self._changed.notify_all()

    def _call(
        self,
        connection: Connection,
        verb: str,
        *arguments: object,
        body: Sequence[memoryview] = (),
        into: memoryview | None = None,
    ) -> Any:
        try:
            connection.send((verb, arguments), body)
            (answer, failure), _body = connection.receive(into)
        except TimeoutError as late:
            text = f"the process that speaks to {self.url} does not answer"
            raise _Lost(
                text, hint="Is it stopped, or does the resolver hang?  Run the command again."
            ) from late
        except (OSError, EOFError) as lost:
            raise self._lost() from lost
        if failure is not None:
            raise failure.again()
        return answer

    def _lost(self) -> _Lost:
        return _Lost(
            f"the process that speaks to {self.url} has ended",
            hint="Something has killed it; run the command again.",
        )


class _Lost(StoreUnreachable):
    """The other process does not answer any more."""


# -- there -----------------------------------------------------------------------------------------


_Answer = tuple[Any, Sequence[memoryview]]


class _Failure(Struct, frozen=True):
    """An error in a form for the other process; its causes are not pickled with it."""

    error: Exception
    causes: list[tuple[str, str]]  # names of their classes, and their messages
    trace: str = ""  # the traceback of a bug

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        """Describe an error."""
        causes, cause = [], error.__cause__
        while cause is not None:
            causes.append((type(cause).__name__, str(cause)))
            cause = cause.__cause__
        trace = ""
        if not isinstance(error, CriuctlError):
            import traceback

            trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  # our own, just made
        except Exception:
            return cls(StoreError(f"{type(error).__name__}: {error}"), causes, trace)
        return cls(error, causes, trace)

    def again(self) -> Exception:
        """Return the error, to be raised here."""
        effect: BaseException = self.error
        for name, text in self.causes:
            effect.__cause__ = type(name, (Exception,), {})(text)
            effect = effect.__cause__
        if self.trace:
            self.error.add_note(f"in the process that speaks to the store:\n{self.trace}")
        return self.error


def serve(shared: Shared, control: Connection, connections: list[Connection]) -> None:
    """Load the slow modules, read which store it is, and serve it until the other end closes.

    `EOFError` then.
    """
    with suppress(Exception):  # met again, and reported, when the store is opened
        from .s3 import S3Store  # noqa: F401

    (url, config), _ = control.receive()
    opened = Later(lambda: _prepared(url, config))

    def prepare() -> None:
        opened.run()
        with suppress(OSError):
            control.send("ready")

    try:
        threading.Thread(target=prepare, daemon=True).start()
    except RuntimeError:  # no resources for one more
        prepare()
    waiting = {
        connection.fileno(): _Server(opened, shared, connection) for connection in connections
    }
    poller = select.poll()
    for number in (control.fileno(), *waiting):
        poller.register(number, select.POLLIN)
    while True:
        for number, _event in poller.poll():
            if number == control.fileno():
                control.receive()
            try:
                threading.Thread(target=waiting[number].run, daemon=True).start()
                poller.unregister(number)
            except RuntimeError:
                if not waiting[number].answer():
                    poller.unregister(number)


def _prepared(url: str, config: Config) -> Store:
    store = open_store(url, config)
    store.prepare()
    return store


class _Server:
    """Answers the requests of one connection."""

    def __init__(self, opened: Later[Store], shared: Shared, connection: Connection) -> None:
        self._opened, self._shared, self._connection = opened, shared, connection
        self._listing: Iterator[ObjectInfo] = iter(())
        self._verbs: dict[str, Callable[..., _Answer]] = {
            "put": self._put,
            "read_into": self._read_into,
            "list": self._list,
            "more": self._more,
            "enough": self._enough,
        }

    def run(self) -> None:
        """Serve until the other end closes."""
        try:
            while self.answer():
                pass
        finally:
            self._connection.close()  # whatever has ended it: no caller may wait for an answer

    def answer(self) -> bool:
        """Answer one request; return False if none came."""
        try:
            (verb, arguments), body = self._connection.receive()
        except (OSError, EOFError):
            return False
        answer, failure = None, None
        back: Sequence[memoryview] = ()
        try:
            if (do := self._verbs.get(verb)) is not None:
                answer, back = do(body, *arguments)
            else:
                answer = getattr(self._opened.result(), verb)(*arguments)
        except Exception as error:
            failure = _Failure.of(error)
        with suppress(OSError):  # the caller is gone, which the next `receive` notices
            self._connection.send((answer, failure), back)
        return True

    def _put(
        self, body: memoryview, name: str, places: list[int | slice], if_absent: bool
    ) -> _Answer:
        views, done = [], 0
        for place in places:
            if isinstance(place, slice):
                views.append(self._shared.at(place))
            else:
                views.append(body[done : done + place])
                done += place
        return self._opened.result().put(name, views, if_absent=if_absent), []

    def _read_into(self, _body: memoryview, name: str, offset: int, place: int | slice) -> _Answer:
        target = (
            self._shared.at(place) if isinstance(place, slice) else memoryview(bytearray(place))
        )
        self._opened.result().read_into(name, offset, target)
        return None, [] if isinstance(place, slice) else [target]

    def _list(self, body: memoryview, prefix: str) -> _Answer:
        self._listing = self._opened.result().list(prefix)
        return self._more(body)

    def _more(self, _body: memoryview) -> _Answer:
        return [*islice(self._listing, _LISTED)], []

    def _enough(self, _body: memoryview) -> _Answer:
        self._listing = iter(())
        return None, []

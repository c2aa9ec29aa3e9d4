"""The page's questions, answered from `ops`: sessions, trees, connections, checkpoints.

Everything that reads files, or asks a holder or a store, runs in a thread of `Desk.off`, so a slow
store does not block a terminal. A listing of the store is kept for a few seconds, and made once for
any number of pages.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from aiohttp import web
from msgspec import Struct, field

from .. import __version__
from ..config import Config
from ..errors import CriuctlError, NotFound
from ..host.registry import Registry
from ..host.target import Target
from ..proc.tree import read_tree
from ..report import Reporter
from .access import GRANT, refusal
from .links import EVERYTHING

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 16
_FRESH = 5.0  # seconds for which a listing of the store is used
_SHOWN = 500  # checkpoints of one session that a page gets, the newest
_CHARTED = 60  # of them, those whose freeze times are looked up
_KEPT_TIMINGS = 20_000
_ID = re.compile(r"[0-9a-f]{32}")
# by exit code
_STATUS = {
    2: 400,
    3: 404,
    4: 409,
    5: 500,
    6: 500,
    7: 503,
    8: 500,
    9: 409,
    10: 403,
    12: 504,
    13: 501,
}


class Desk(Struct):
    """The shared state of one server's handlers."""

    config: Config
    read_only: bool = False
    reporter: Reporter = field(default_factory=Reporter)
    limits: tuple[str, ...] = ()  # see `server.Opened`
    hosts: tuple[str, ...] = ()  # the names of other hosts whose sessions are shown
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_THREADS, "criuctl-ui")
    )
    _listing: asyncio.Task[list[dict[str, Any]]] | None = None
    _listed: float = 0.0
    _timings: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def off(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that may block, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: function(*args, **kwargs)
        )

    def close(self) -> None:
        """Close without waiting: the results of running threads are not needed."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def checkpoints(self) -> list[dict[str, Any]]:
        """Return every checkpoint of the store, as ``criuctl list --json`` prints them, a few
        seconds old at most.
        """
        if self._listing is None or (
            self._listing.done() and time.monotonic() - self._listed > _FRESH
        ):
            self._listing = asyncio.create_task(self._list())
        return await asyncio.shield(self._listing)

    def forget_listing(self) -> None:
        """Drop the listing because a checkpoint was added or removed: the next question asks the
        store.
        """
        self._listing = None

    async def _list(self) -> list[dict[str, Any]]:
        from ..ops.inspect import list_checkpoints

        try:
            return [
                summary.to_dict()
                for summary in (await self.off(list_checkpoints, self.config)).checkpoints
            ]
        finally:
            self._listed = time.monotonic()

    async def timings(self, session: str) -> list[dict[str, Any]]:
        """See `ops.history`."""
        from ..ops.storing.history import timings

        if len(self._timings) > _KEPT_TIMINGS:
            self._timings.clear()
        return await self.off(timings, self.config, session, _CHARTED, self._timings)


def error_response(error: CriuctlError) -> web.Response:
    """Return an expected error as the page gets it."""
    return web.json_response(
        {"error": error.to_dict()}, status=_STATUS.get(error.exit_code, 500), dumps=_dumps
    )


def _dumps(value: Any) -> str:
    return json.dumps(value, default=str)


@web.middleware
async def errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Turn every failure of a question into an answer; an unexpected one is reported on the
    server's side as well.
    """
    desk = request.app[DESK]
    try:
        response: web.StreamResponse = await handler(request)
    except CriuctlError as error:
        return error_response(error)
    except web.HTTPException as error:
        return refusal(error.status, "http", f"{request.path}: {error.reason}")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:  # a bug must not end as an empty page
        desk.reporter.warning(f"{request.method} {request.path}: {type(error).__name__}: {error}")
        return refusal(
            500,
            "bug",
            f"a bug in criuctl: {type(error).__name__}",
            "The server's terminal says more.",
        )
    return response


DESK = web.AppKey("desk", Desk)


async def about(request: web.Request) -> web.Response:
    """Describe this server: the first question of every page, which shows whether its token is
    valid.
    """
    desk, grant = request.app[DESK], request.get(GRANT, EVERYTHING)
    body = {
        "version": __version__,
        "host": os.uname().nodename,
        "read_only": desk.read_only or grant.role == "observe",
    }
    more: dict[str, Any] = {"store": desk.config.store, "limits": desk.limits, "hosts": desk.hosts}
    if grant.limited:
        more = {"link": grant.to_dict()}
    return web.json_response(body | more)


async def tree(request: web.Request) -> web.Response:
    """Return the current processes of a session."""
    desk = request.app[DESK]

    def look() -> list[dict[str, Any]]:
        return [
            {
                "pid": p.pid,
                "ns_pid": p.ns_pid,
                "ppid": p.ppid,
                "command": p.command,
                "argv": list(p.argv),
                "state": p.state,
                "threads": p.threads,
                "uid": p.uid,
                "rss": p.rss,
            }
            for p in read_tree(_running(desk.config, request.match_info["name"]).root.pid)
        ]

    return web.json_response(await desk.off(look), dumps=_dumps)


async def connections(request: web.Request) -> web.Response:
    """Return its connections, with the decision that a dump now would make for them."""
    from ..dump.connection_report import connections as look

    desk = request.app[DESK]

    def found() -> list[dict[str, Any]]:
        target = _running(desk.config, request.match_info["name"])
        return [record.to_dict() for record in look(desk.config, target, reporter=Reporter())]

    return web.json_response(await desk.off(found), dumps=_dumps)


def _running(config: Config, name: str) -> Target:
    identity = Registry(config).lookup(name)
    if identity is None or not identity.alive():
        raise NotFound(f"session {name!r} is not running on this host")
    return Target(identity, name)


async def newest(request: web.Request) -> web.Response:
    """Return the newest checkpoint of each session of the store, and how many it has."""
    counted: dict[str, dict[str, Any]] = {}
    for summary in await request.app[DESK].checkpoints():
        before = counted.get(summary["session"], {"count": 0})
        counted[summary["session"]] = {**summary, "count": before["count"] + 1}
    return web.json_response(counted, dumps=_dumps)


async def checkpoints(request: web.Request) -> web.Response:
    """Return the checkpoints of one session, oldest first."""
    name = request.match_info["name"]
    of_it = [
        summary for summary in await request.app[DESK].checkpoints() if summary["session"] == name
    ]
    return web.json_response({"count": len(of_it), "checkpoints": of_it[-_SHOWN:]}, dumps=_dumps)


async def timings(request: web.Request) -> web.Response:
    """Return the durations of the newest of them."""
    return web.json_response(
        await request.app[DESK].timings(request.match_info["name"]), dumps=_dumps
    )


async def checkpoint(request: web.Request) -> web.Response:
    """Return the content of one checkpoint, by its id only, because a path would be a file of this
    host.
    """
    from ..ops.inspect import show

    desk, identifier = request.app[DESK], request.match_info["id"]
    if _ID.fullmatch(identifier) is None:
        raise NotFound(f"{identifier[:40]!r} is no checkpoint's id")
    shown = await desk.off(show, desk.config, identifier)
    return web.json_response(_page_of(shown.to_dict()), dumps=_dumps)


async def difference(request: web.Request) -> web.Response:
    """Return what is different between two checkpoints, given by their ids."""
    from ..ops.diff import diff

    desk = request.app[DESK]
    before, after = request.match_info["before"], request.match_info["after"]
    for identifier in (before, after):
        if _ID.fullmatch(identifier) is None:
            raise NotFound(f"{identifier[:40]!r} is no checkpoint's id")
    found = await desk.off(diff, desk.config, before, after, reporter=Reporter())
    body = found.to_dict()
    for kind in ("processes", "descriptors", "connections", "files"):
        for change in ("added", "removed", "changed"):
            body[kind][change] = body[kind][change][:_SHOWN]
    return web.json_response(body, dumps=_dumps)


def _page_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without what the page does not show; a tree may have very many files."""
    left_out = ("images", "machine", "hooks", "features", "origin")
    page = {key: value for key, value in body.items() if key not in left_out}
    page["machine"] = {key: body["machine"].get(key) for key in ("kernel", "arch", "cpu_model")}
    page["files"] = sorted(
        body["files"], key=lambda f: (f["kind"] != "written", not f["carried"], f["path"])
    )[:_SHOWN]
    page["files_count"] = len(body["files"])
    return page


ROUTES = (
    web.get("/api/about", about),
    web.get("/api/sessions/{name}/tree", tree),
    web.get("/api/sessions/{name}/connections", connections),
    web.get("/api/sessions/{name}/checkpoints", checkpoints),
    web.get("/api/sessions/{name}/timings", timings),
    web.get("/api/newest", newest),
    web.get("/api/checkpoints/{id}", checkpoint),
    web.get("/api/differences/{before}/{after}", difference),
)

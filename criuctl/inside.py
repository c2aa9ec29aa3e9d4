"""For programs in a session: durable steps, and what a restore has done to this process. Standard
library only.

    from criuctl import inside

    with inside.step("charge-42", kind="once", verify=was_charged) as s:
        if not s.done:
            s.result = pay(42, idempotency_key=s.key)

    inside.mark_progress("import", 0.4, cursor=1200)
    inside.progress("import").cursor

    inside.invalidate_if(file="/etc/app.conf", age="7d")  # a later checkpoint, at its restore
    cp = inside.checkpoint(label="before migration")  # cp.restored: this is a later life

    @inside.before_checkpoint  # and after_restore, after_fork
    def flush(): ...

    @inside.on_copy  # `random` and `numpy.random` have new seeds; also without a function
    def take_new_keys(): ...

    inside.identity()  # {"session": "web", "incarnation": 3, "checkpoint": "...",
                       #  "restored": "2025-..."}, or None
    inside.report()    # the same, with "connections": the outcome of each connection, as in
                       # `criuctl restore --json`

The journal of steps is the session's holder's, outside the memory that a restore brings back. Each
request is a connection of its own to the socket ``steps`` in CRIUCTL_SESSION_DIR, so a step that is
under way holds no descriptor, and none is in the way of a dump. While a dump has the socket closed,
requests are repeated; an attempt has a token, so repeating one does no harm. Outside a session the
steps are kept in a file next to the program, ``PROGRAM.steps``, or CRIUCTL_STEPS_FILE; there is no
checkpoint, and functions for one are never called.

A restore leaves one small file for the tree before any process of it runs, named after the PID
namespace and the PID of the tree's root. A process finds it by walking up its ancestors. The file
is readable by all users and holds no secret. None means that no ancestor was restored by criuctl,
or that the file is not visible from here (another root folder).

This module may be copied: it imports nothing of criuctl.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import signal
import socket
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar, overload

__all__ = [
    "Checkpoint",
    "Progress",
    "Step",
    "StepBusy",
    "StepError",
    "StepUnknown",
    "Veto",
    "after_fork",
    "after_restore",
    "before_checkpoint",
    "checkpoint",
    "generation",
    "identity",
    "invalidate_if",
    "mark_progress",
    "on_copy",
    "progress",
    "report",
    "reseed",
    "step",
]

_RUN_DIR = "/run/criuctl"  # only root can create files in it
_IDENTITY = ("session", "incarnation", "checkpoint", "restored")
_PATIENCE = 60.0  # seconds for a holder that does not answer
_PAUSE, _LONGEST_PAUSE = 0.01, 0.25  # seconds between two tries
_ANSWER_SECONDS = 30.0
_LONGEST_ANSWER = 1 << 20
_LARGEST_FILE = 64 << 20  # bytes of a file that invalidates checkpoints
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+=,-]{0,199}")


# -- steps ----------------------------------------------------------------------------------------


class StepError(Exception):
    """A step, or another request, was not recorded or is not possible; `code` is a word for
    programs.
    """

    def __init__(self, message: str, code: str = "failed", **details: Any) -> None:
        super().__init__(message)
        self.code, self.details = code, details


class StepBusy(StepError):
    """Another attempt of this step is under way; ``details["pid"]`` is its process."""


class StepUnknown(StepError):
    """An earlier attempt of a once step was lost between its effect and its record.

    Give the step a `verify`, or `by_key` if the receiver recognises its key, or let an operator
    find out, and say so with `criuctl step resolve`.
    """


class Progress:
    """How far a step has come: `fraction` from 0 to 1, `cursor`, and the step's `state` or ""."""

    def __init__(self, fraction: float | None, cursor: Any, state: str) -> None:
        self.fraction, self.cursor, self.state = fraction or 0.0, cursor, state

    def __repr__(self) -> str:
        return f"Progress(fraction={self.fraction!r}, cursor={self.cursor!r}, state={self.state!r})"


class Step:
    """One attempt of a step; a context manager. See `step`."""

    def __init__(
        self, id: str, kind: str, verify: Callable[[str], Any] | None, by_key: bool, cursor: Any
    ) -> None:
        self.id, self.kind, self._verify, self._by_key = id, kind, verify, by_key
        self.token = os.urandom(12).hex()
        self.key = ""  # the same in every attempt and after every restore
        self.done = False  # it is done, in an earlier attempt
        self.result: Any = None  # of the step; set it while it runs: any JSON value up to 64 KiB
        self.cursor = cursor  # the last one that was recorded, or the first
        self.attempts = 0  # this one included
        self._error = ""
        self._running = False

    def __enter__(self) -> Step:
        answer = self._begin(again=False)
        if answer["state"] == "unknown" and self._verify is not None:
            found = self._verify(answer["key"])
            if found is None or found is False:
                answer = self._begin(again=True)
            else:
                result = None if found is True else found
                answer = _ask("step-done", self.id, self.token, result=result, verified=True)
        elif answer["state"] == "unknown" and self._by_key:
            answer = self._begin(again=True)
        if answer["state"] == "unknown":
            raise StepUnknown(
                f"step {self.id!r} was lost between its effect and its record in an earlier "
                "attempt; whether it is done has to be found out",
                "unknown",
                key=answer["key"],
            )
        self.key, self.attempts = answer["key"], answer["attempts"]
        self.done = answer["state"] == "done"
        self._running = not self.done
        self.result, self.cursor = answer["result"], answer["cursor"]
        if self._running:
            _running[self.id] = self.token
        return self

    def _begin(self, *, again: bool) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": self.kind, "again": again}
        if self.cursor is not None:
            facts["cursor"] = self.cursor
        return _ask("step-begin", self.id, self.token, **facts)

    def fail(self, error: str) -> None:
        """State that this attempt has had no effect: the step is ``failed`` and may run again."""
        self._error = error or "failed"

    def mark_progress(self, fraction: float, cursor: Any = None) -> None:
        """Record how far this step has come."""
        mark_progress(self.id, fraction, cursor)
        self.cursor = cursor

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Record the result. An exception does not tell whether the effect has happened: a once
        step is ``unknown`` then, unless `fail` was called; another is ``failed``.
        """
        if not self._running:
            return
        self._running = False
        _running.pop(self.id, None)
        if error is None and not self._error:
            answer = _ask("step-done", self.id, self.token, result=self.result)
            self.done, self.result = True, answer["result"]
            return
        text = self._error or f"{type(error).__name__}: {error}"
        try:
            _ask("step-failed", self.id, self.token, error=text, unknown=not self._error)
        except StepError:
            if error is None:
                raise


_running: dict[str, str] = {}  # steps of this process that are under way -> token


def step(
    id: str,
    kind: str = "once",
    *,
    verify: Callable[[str], Any] | None = None,
    by_key: bool = False,
    cursor: Any = None,
) -> Step:
    """Return a context manager for the step `id`: a piece of work that is recorded when it is done.

    Kinds: ``safe`` may run again after a crash; ``once`` may not; ``resumable`` goes on at its
    `cursor`. If an earlier attempt of a once step was lost between its effect and its record,
    `verify` is called with the step's key: a false value says that the effect has not happened,
    and the body runs; True, or the result, that it has. With `by_key` the body runs again with the
    same key, which the receiver must recognise. Without both, `StepUnknown` is raised.

    The body must look at ``done`` and, if it is false, do the work and set ``result``.
    """
    return Step(id, kind, verify, by_key, cursor)


def mark_progress(id: str, fraction: float, cursor: Any = None) -> None:
    """Record how far the step has come, and where to go on; a lower fraction than the recorded one
    is ignored. A step that has not begun begins, as resumable; 1 ends it.
    """
    mine = _running.get(id)
    token = mine or os.urandom(12).hex()
    answer = _ask("step-progress", id, token, fraction=fraction, cursor=cursor)
    if fraction >= 1 and mine is None and answer["state"] == "began":
        _ask("step-done", id, answer["attempt"])


def progress(id: str) -> Progress:
    """Return how far the step has come; the cursor of a step that has not begun is None."""
    try:
        known = _ask("step-show", id, "")["step"]
    except StepError as error:
        if error.code != "not-found":
            raise
        return Progress(None, None, "")
    return Progress(known["progress"], known["cursor"], known["state"])


# -- checkpoints ----------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """A checkpoint that exists, and on which side of it this process is."""

    id: str
    restored: bool  # this process was restored from it, or it goes on since


class Veto(Exception):
    """Raise it in a function for `before_checkpoint`: no checkpoint now, for this reason."""


def checkpoint(label: str = "") -> Checkpoint:
    """Have the session checkpointed, and go on when the checkpoint is durable.

    A restore from it returns from this very call, with ``restored`` true. `label` (200 characters)
    is among the labels of the checkpoint. `StepError` with the reason if it fails or is refused;
    the program goes on. All processes of the session are in the checkpoint.
    """
    if _calling and threading.current_thread() is threading.main_thread():
        raise StepError("a checkpoint waits for this function", "busy")
    token = os.urandom(12).hex()
    answer = _of_session({"op": "checkpoint", "attempt": token, "label": label})
    return Checkpoint(answer["checkpoint"], answer["restored"])


def invalidate_if(
    *,
    file: str | os.PathLike[str] | None = None,
    age: str | None = None,
    output: str | None = None,
    command: str | None = None,
) -> None:
    """Make every later checkpoint of the session stale, for a restore, if by then

    - the contents of `file` (up to 64 MiB, a path of the host) have changed,
    - it is older than `age` (``36h``, ``7d``),
    - the shell command `output` prints something else, or ends with another code than 0,
    - the shell command `command` ends with another code than 0.

    A restore refuses a stale checkpoint without ``--force``. Commands are for programs of root in
    sessions of root. What was asked for comes back with the program, and lasts as long as its
    session. `StepError` if it is refused.
    """
    path = None if file is None else os.path.abspath(os.fsdecode(file))
    if path is not None:
        _check_file(path)
    asked = {"file": path, "age": age, "output": output, "command": command}
    for kind, argument in asked.items():
        if argument is not None:
            _of_session({"op": "invalidate-if", "kind": kind, "argument": argument})


def _check_file(path: str) -> None:
    try:
        found = os.stat(path)
    except OSError as error:
        raise StepError(f"{path}: {error.strerror}", "not-found") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_FILE:
        text = f"{path}: not a regular file of at most {_LARGEST_FILE >> 20} MiB"
        raise StepError(text, "bad-request")


def _of_session(message: dict[str, Any]) -> dict[str, Any]:
    if not _session_folder():
        raise StepError("this program runs in no session of criuctl", "no-session")
    return _answer(message)


# -- functions around checkpoints -----------------------------------------------------------------


_F = TypeVar("_F", bound=Callable[[], Any])
_BEFORE, _RESTORED, _FORKED = "before-checkpoint", "after-restore", "after-fork"
_functions: dict[str, list[Callable[[], Any]]] = {}
_functions_of = 0  # the process that has them: a forked child has none
_calling = _signalled = False
_former: Any = None  # the handler of SIGURG before


def before_checkpoint(function: _F) -> _F:
    """Call `function`, without arguments, before each checkpoint; the dump waits for it, for
    ``hook_timeout`` (30 s) of the configuration. It may raise `Veto`. Any other exception, and one
    that is late, is a warning of the dump, which goes on. Usable as a decorator.

    It is called in the main thread, between two instructions of Python, as a handler of a signal
    (SIGURG) is: it must not take a lock that the main thread may hold. To have no call in a piece
    of code, block that signal with `signal.pthread_sigmask`. Register functions in the main thread;
    a child process (fork) has none of its parent's. Outside a session they are never called.
    """
    return _register(_BEFORE, function)


def after_restore(function: _F) -> _F:
    """Call `function` after each restore, when the program runs; see `before_checkpoint`."""
    return _register(_RESTORED, function)


def after_fork(function: _F) -> _F:
    """Call `function`, in the place of those of `after_restore`, after a restore as another session
    (``restore --as``); see `before_checkpoint`.
    """
    return _register(_FORKED, function)


@overload
def on_copy(function: _F) -> _F: ...
@overload
def on_copy(function: None = None) -> None: ...
def on_copy(function: _F | None = None) -> _F | None:
    """Call `reseed`, and then `function`, after each restore: each may have made one of several
    copies, which have the same past. See `before_checkpoint`.

    Other than `after_restore` and `after_fork` it is for what must never be the same in two copies:
    seeds, keys, identities.
    """
    for event in (_RESTORED, _FORKED):
        _register(event, reseed)
        if function is not None:
            _register(event, function)
    return function


def reseed() -> None:
    """Give the global generators of `random` and, if they are loaded, of `numpy.random` and `ssl`
    new seeds from the kernel. Generators that the program has made itself stay as they are.
    """
    random.seed()
    if (ssl := sys.modules.get("ssl")) is not None:  # an OpenSSL that no restore can find, too
        ssl.RAND_add(os.urandom(32), 32.0)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()


def generation() -> str:
    """Return what is never the same in two lives of this session, nor in two copies; "" outside a
    session. A program that keeps what must be its own compares it before each use.
    """
    try:
        with open(os.path.join(_session_folder(), "generation")) as file:
            return file.read().partition(" ")[0]
    except OSError:
        return ""


def _register(event: str, function: _F) -> _F:
    global _former, _functions_of
    if _functions_of != os.getpid():
        _functions.clear()
        _functions_of = os.getpid()
    known = _functions.setdefault(event, [])
    if function in known:
        return function
    if known or not _session_folder():
        known.append(function)
        return function
    if signal.getsignal(signal.SIGURG) is not _on_signal:
        try:
            _former = signal.signal(signal.SIGURG, _on_signal)
        except ValueError:
            del _functions[event]
            text = "functions around checkpoints have to be registered in the main thread"
            raise StepError(text, "bad-request") from None
    known.append(function)
    try:
        _answer({"op": "callbacks", "events": sorted(_functions)})
    except StepError:
        del _functions[event]
        raise
    return function


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Call the functions of each event that there is."""
    global _calling, _signalled
    if callable(_former):
        _former(number, frame)
    _signalled = _functions_of == os.getpid()
    while _signalled and not _calling:  # one that comes meanwhile is handled by the next round
        _calling, _signalled = True, False
        try:
            while (call := _answer({"op": "callback-next"})).get("event"):
                outcome = _outcome(call["event"])
                _answer({"op": "callback-done", "call": call["call"], **outcome})
        except StepError:
            pass  # no holder answers: it, or the dump that waits for it, reports that
        finally:
            _calling = False


def _outcome(event: str) -> dict[str, str]:
    """Call the functions of an event, all of them; return the first veto, or the first error."""
    found: dict[str, str] = {}
    for function in list(_functions.get(event, ())):
        try:
            function()
        except Veto as veto:
            found.setdefault("veto", str(veto) or "it gives no reason")
        except Exception as error:
            name = getattr(function, "__name__", "function")
            found.setdefault("error", f"{name}: {type(error).__name__}: {error}")
    return found


# -- the journal ----------------------------------------------------------------------------------


def _ask(op: str, id: str, token: str, **facts: Any) -> dict[str, Any]:
    """Send a request to the journal, the holder's or the file; return the answer."""
    message = {"op": op, "step": id, "attempt": token, **facts}
    if not _session_folder():
        return _file().ask(message)
    return _answer(message)


def _answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return the holder's answer; `StepError` if it refuses."""
    answer = _ask_holder(message)
    error = answer.get("error")
    if error is not None:
        raise _error(error["code"], error["message"], **(error.get("details") or {}))
    return answer


def _error(code: str, message: str, **details: Any) -> StepError:
    return (StepBusy if code == "busy" else StepError)(message, code, **details)


def _session_folder() -> str:
    """Return the folder of the session in which this process runs; "": in none."""
    folder = os.environ.get("CRIUCTL_SESSION_DIR", "")
    if not folder and os.path.exists(f"{_RUN_DIR}/session/session.json"):
        folder = f"{_RUN_DIR}/session"  # the environment was cleaned
    return folder


def _ask_holder(message: dict[str, Any]) -> dict[str, Any]:
    """Ask the session's holder, again as long as a dump or a restore is in the way.

    Only pauses are counted, no clock is read: a freeze, or a life on another host, is no time.
    """
    try:
        line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise StepError(f"no JSON value: {error}", "bad-request") from error
    paused, pause, why = 0.0, _PAUSE, "it asks to wait"
    while paused < _PATIENCE:
        try:
            # Looked up for each try: a restore in between may have changed it.
            answer = _exchange(os.path.join(_session_folder(), "steps"), line)
        except (OSError, ValueError) as error:
            why = str(error)
        else:
            if "again" not in answer:
                return answer
            paused, why = 0.0, "it asks to wait"  # for a dump, or for the store
        time.sleep(pause)
        paused, pause = paused + pause, min(_LONGEST_PAUSE, pause * 2)
    raise StepError(f"the holder of this session does not answer: {why}", "unreachable")


def _exchange(path: str, line: bytes) -> dict[str, Any]:
    """Send one line and return the one that is answered."""
    fd = -1
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(_ANSWER_SECONDS)
        try:
            if len(os.fsencode(path)) > 100:  # of the 107 bytes that the kernel takes
                fd = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
                path = f"/proc/self/fd/{fd}/{os.path.basename(path)}"
            sock.connect(path)
        finally:
            if fd >= 0:
                os.close(fd)
        sock.sendall(line)
        data = b""
        while not data.endswith(b"\n"):
            piece = sock.recv(1 << 16)
            if not piece or len(data) > _LONGEST_ANSWER:
                raise ValueError("the connection was closed")
            data += piece
    answer = json.loads(data)
    if not isinstance(answer, dict):
        raise ValueError("no answer of a holder")
    return answer


_files: dict[str, _File] = {}


def _file() -> _File:
    """Return the journal next to the program."""
    path = os.environ.get("CRIUCTL_STEPS_FILE", "")
    if not path:
        program = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
        if not program or program.startswith("-"):
            raise StepError(
                "this program runs in no session and has no file: set CRIUCTL_STEPS_FILE to a path",
                "no-file",
            )
        path = os.path.abspath(program) + ".steps"
    return _files.setdefault(path, _File(path))


class _File:
    """The journal in a file, by the rules of the holder's; one test runs the same cases on both.

    It is opened, locked, read on, and closed for each request. A line is ``CRC JSON``; one that is
    cut at the end is removed, one in the middle that is wrong is an error.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._steps: dict[str, dict[str, Any]] = {}
        self._read, self._file, self._id = 0, (0, 0), ""

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks, and return the answer when the file has it."""
        if not _ID.fullmatch(message["step"]):
            raise _error("bad-request", f"{message['step']!r} cannot be a step's id")
        for key, most in (("result", 64 << 10), ("cursor", 4 << 10)):
            try:
                size = len(json.dumps(message.get(key), separators=(",", ":"), allow_nan=False))
            except (TypeError, ValueError) as error:
                raise _error("bad-request", f"{key!r} is no JSON value") from error
            if size > most:
                raise _error("bad-request", f"{key!r} has {size} bytes as JSON, of at most {most}")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(self._path, flags, 0o600)
        except OSError as error:
            text = f"{self._path}: {error.strerror}; CRIUCTL_STEPS_FILE names another place"
            raise _error("no-file", text) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._load(fd)
            return self._do(fd, message)
        finally:
            os.close(fd)

    def _do(self, fd: int, message: dict[str, Any]) -> dict[str, Any]:
        op, name = message["op"], message["step"]
        old = self._steps.get(name)
        if op == "step-begin" or (op == "step-progress" and old is None):
            new, run = self._begun(old, message)
            if op == "step-begin":
                return self._put(fd, old, new) | {"run": run}
            old = self._put(fd, None, new)
        if old is None:
            raise _error("not-found", f"there is no step {name!r}")
        if op == "step-show":
            return {"step": self._settled(old)}
        return self._put(fd, old, {**old, **self._changes(op, old, message)})

    def _changes(self, op: str, old: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        """Return what a word of an attempt changes in a step."""
        if op == "step-progress":
            fraction = message["fraction"]
            if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
                raise _error("bad-request", "'fraction' must be a number from 0 to 1")
            if old["state"] != "began" or fraction < (old["progress"] or 0.0):
                return {}
            return {"progress": float(fraction), "cursor": message["cursor"]}
        if old["state"] == "done":
            return {}
        mine = old["attempt"] == message["attempt"]
        if op == "step-done":
            good = old["state"] in (("began", "unknown") if mine else ("unknown",))
            changes: dict[str, Any] = {"state": "done", "result": message["result"], "error": ""}
            if old["progress"] is not None or old["kind"] == "resumable":
                changes["progress"] = 1.0
            good = good and (mine or message.get("verified") is True)
        else:
            unknown = message["unknown"] and old["kind"] == "once"
            changes = {
                "state": "unknown" if unknown else "failed",
                "error": message["error"][:2000],
            }
            good = mine
            if mine and old["state"] == "failed":
                return {}
        if not good:
            raise _error("state", f"this attempt of step {old['id']!r} is not under way")
        return {**changes, "ended": round(time.time(), 3), "owner": None}

    def _begun(
        self, old: dict[str, Any] | None, message: dict[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """Return the step after a request to begin it, and whether its body is to run."""
        kind, token = message.get("kind", "resumable"), message["attempt"]
        if kind not in ("safe", "once", "resumable"):
            raise _error("bad-request", "'kind' must be one of safe, once, resumable")
        if old is not None:
            if old["state"] == "done":
                return old, False
            if old["kind"] != kind:
                raise _error("state", f"step {old['id']!r} is of the kind {old['kind']!r}")
            if old["state"] == "began" and old["attempt"] == token:
                return old, True
            if old["state"] == "began" and _lives(old["owner"]):
                pid = old["owner"][0]
                raise _error("busy", f"step {old['id']!r} is under way in PID {pid}", pid=pid)
            if kind == "once" and old["state"] != "failed" and not message.get("again"):
                return {**old, "state": "unknown", "owner": None}, False
        name = message["step"]
        key = hashlib.blake2b(f"{self._id}\0{name}".encode(), digest_size=16).hexdigest()
        new = {"id": name, "kind": kind, "state": "began", "key": key, "attempt": token}
        new |= {"attempts": old["attempts"] + 1 if old is not None else 1, "owner": _me()}
        new |= {"began": round(time.time(), 3), "ended": None, "result": None, "error": ""}
        before = old or {"progress": None, "cursor": None}
        cursor = message.get("cursor")
        kept = before["cursor"] if cursor is None else cursor
        return {**new, "progress": before["progress"], "cursor": kept}, True

    def _settled(self, step: dict[str, Any]) -> dict[str, Any]:
        """Return a step as it has to be reported: an attempt whose process is gone was lost."""
        gone = step["state"] == "began" and step["kind"] == "once" and not _lives(step["owner"])
        return {**step, "state": "unknown"} if gone else step

    # -- the file

    def _put(self, fd: int, old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
        """Append a step that has changed, and return it when it is on the disk."""
        if new != old:
            self._append(fd, {"s": new})
            self._steps[new["id"]] = new
        return new

    def _append(self, fd: int, body: dict[str, Any]) -> None:
        text = json.dumps(body, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            if os.write(fd, line) < len(line):
                raise OSError(28, "No space left on device")
            os.fsync(fd)
        except OSError as error:
            os.ftruncate(fd, self._read)
            raise _error("failed", f"{self._path}: {error.strerror}") from error
        self._read += len(line)

    def _load(self, fd: int) -> None:
        """Read what other processes have appended; begin a new file."""
        known = os.fstat(fd)
        if (known.st_ino, known.st_dev) != self._file or known.st_size < self._read:
            self._steps, self._read, self._file = {}, 0, (known.st_ino, known.st_dev)
        while line := self._line(fd):
            text = line[9:-1]
            if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(text):
                if known.st_size > self._read + len(line):
                    raise _error("damaged", f"{self._path}: the line at {self._read} is damaged")
                os.ftruncate(fd, self._read)  # a crash has cut it
                break
            body = json.loads(text)
            self._id = body.get("session", self._id)
            if "s" in body:
                self._steps[body["s"]["id"]] = body["s"]
            self._read += len(line)
        if self._read == 0:
            self._id = os.urandom(16).hex()
            self._append(fd, {"journal": 1, "session": self._id})
            folder = os.open(os.path.dirname(os.path.abspath(self._path)), os.O_RDONLY)
            try:
                os.fsync(folder)  # a new file whose name is lost would lose what is done
            finally:
                os.close(folder)

    def _line(self, fd: int) -> bytes:
        """Return the next line that was not read, or what there is of it."""
        line = b""
        while b"\n" not in line and (piece := os.pread(fd, 1 << 16, self._read + len(line))):
            line += piece
        return line[: line.find(b"\n") + 1 or None]


def _me() -> list[Any]:
    """Return PID and start time of this process, and the boot that they belong to."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return [os.getpid(), _started(os.getpid()), boot]


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    return 0 if words[0] in (b"Z", b"X") else int(words[19])


def _lives(owner: list[Any] | None) -> bool:
    """Whether the process of an attempt lives."""
    try:
        return owner is not None and [owner[0], _started(owner[0]), *_me()[2:]] == owner
    except OSError:
        return False


# -- what a restore has done ----------------------------------------------------------------------


def report() -> dict[str, Any] | None:
    """Return the report of this tree's last restore; None for a process that was never restored."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        times = os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return None
    configured = os.environ.get("CRIUCTL_RUN_DIR")
    folders = (configured, _RUN_DIR) if configured else (_RUN_DIR,)
    for pid, started in _ancestors():
        for folder in folders:
            found = _read(os.path.join(folder, "inside", f"{namespace}-{pid}.json"))
            # Outside criuctl's time namespace, start times are counted from another moment.
            if found is not None and (
                found.get("start_time") == started or found.get("time_namespace") != times
            ):
                return found
    return None


def identity() -> dict[str, Any] | None:
    """Return session, incarnation and checkpoint of this process, and when it was restored; None if
    it was not.
    """
    found = report()
    return None if found is None else {key: found.get(key) for key in _IDENTITY}


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _ancestors() -> Iterator[tuple[int, int]]:
    """Return PID and start time of this process, its parent and so on, as far as they are
    visible.
    """
    pid = os.getpid()
    while pid > 0:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                words = file.read().rpartition(b")")[2].split()
        except OSError:
            return
        yield pid, int(words[19])
        pid = int(words[1])

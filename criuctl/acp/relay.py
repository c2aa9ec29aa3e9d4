"""What is between an editor and its agent: all messages pass, in order, except those on terminals.

- A request of the agent on a terminal is answered here (`terminals`).
- The editor shows a terminal, if it can, by one of its own, which runs ``criuctl attach``; where
  the agent's messages name a terminal to be shown, they name that one for the editor.
- The agent sees a client that has terminals, whether the editor has any or not.

Messages that need no change are passed on as the bytes that came.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ..errors import CriuctlError, of_the_host
from ..proc.line_streams import LineStreams
from ..quoting import quoted
from ..report import Reporter
from .terminals import Terminals, is_terminal

Message = dict[str, Any]
_OWN = "criuctl-"  # begins the ids of this program's own requests
_INVALID, _INTERNAL, _NO_METHOD, _NOT_FOUND = -32602, -32603, -32601, -32002
_SHOWN = 10.0  # seconds for the editor to open a terminal


class Relay:
    """The two ends of one conversation; without an editor only terminals are served."""

    def __init__(
        self,
        agent: LineStreams,
        editor: LineStreams | None,
        terminals: Terminals,
        attach: Sequence[str],
        reporter: Reporter,
    ) -> None:
        """Set up; `attach` is the command that, with a session's name, shows it."""
        self._agent, self._editor, self._terminals = agent, editor, terminals
        self._attach, self._reporter = list(attach), reporter
        self._can_show = False
        self._shown: dict[str, str] = {}  # terminal -> the editor's own that shows it
        self._asked: dict[str, asyncio.Future[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Pass messages on until the editor's or the agent's end is closed."""
        pumps = [asyncio.create_task(self._from_agent())]
        if self._editor is not None:
            pumps.append(asyncio.create_task(self._from_editor(self._editor)))
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                pump.result()
        except ConnectionError:
            pass  # one end has closed while the other was sending
        except ValueError as error:
            self._reporter.warning(f"a message is too long: {error}")
        finally:
            for task in (*pumps, *self._tasks):
                task.cancel()
            await asyncio.gather(*pumps, *self._tasks, return_exceptions=True)

    # -- from the editor --------------------------------------------------------------------------

    async def _from_editor(self, editor: LineStreams) -> None:
        async for line in editor.lines():
            message = _parsed(line)
            identifier = message.get("id")
            if isinstance(identifier, str) and "method" not in message:
                waiting = self._asked.pop(identifier, None)
                if waiting is not None:
                    if not waiting.done():
                        waiting.set_result(message)
                    continue
            if message.get("method") == "initialize" and isinstance(message.get("params"), dict):
                able = message["params"].get("clientCapabilities")
                able = able if isinstance(able, dict) else {}
                self._can_show = able.get("terminal") is True
                message["params"]["clientCapabilities"] = able | {"terminal": True}
                line = _line(message)
            await self._agent.send(line)

    async def _ask_editor(self, method: str, params: Message) -> Message:
        """Send the editor a request of this program's own; return its answer."""
        assert self._editor is not None
        identifier = f"{_OWN}{len(self._asked)}-{id(params):x}"
        waiting = self._asked[identifier] = asyncio.get_running_loop().create_future()
        message = {"jsonrpc": "2.0", "id": identifier, "method": method, "params": params}
        try:
            await self._editor.send(_line(message))
            return await asyncio.wait_for(waiting, _SHOWN)
        finally:
            self._asked.pop(identifier, None)

    # -- from the agent ---------------------------------------------------------------------------

    async def _from_agent(self) -> None:
        async for line in self._agent.lines():
            message = _parsed(line)
            method = message.get("method")
            known = isinstance(method, str) and method in self._terminals.methods
            if "id" in message and known:
                self._begin(self._answer(message, str(method)))
            elif self._editor is not None:
                changed = b"terminalId" in line and self._renamed(message)
                await self._editor.send(_line(message) if changed else line)
            elif "id" in message and method is not None:
                error = {"code": _NO_METHOD, "message": f"only terminals are served here: {method}"}
                await self._agent.send(_line(_response(message, error=error)))

    def _begin(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Message, method: str) -> None:
        """Answer a request on a terminal."""
        kind, function = self._terminals.methods[method]
        params = message.get("params")
        try:
            asked = kind.model_validate(params)
            result = (await function(asked)).model_dump(mode="json", by_alias=True)
            result.pop("_meta", None)
            answer = _response(message, result=result)
            if self._can_show and isinstance(params, dict):
                await self._show(method, params, result)
        except ValidationError as error:
            answer = _response(message, error={"code": _INVALID, "message": str(error)})
        except (CriuctlError, OSError) as error:
            answer = _response(message, error=_error(error))
        await self._agent.send(_line(answer))

    # -- what the editor shows --------------------------------------------------------------------

    async def _show(self, method: str, params: Message, result: Message) -> None:
        """Have the editor open, or release, its own terminal for one of the agent's.

        A failure concerns the view only, and is reported.
        """
        try:
            if method == "terminal/create":
                name = str(result["terminalId"])
                program, *args = [*self._attach, name]
                view = {"sessionId": params["sessionId"], "command": program, "args": args}
                if params.get("cwd"):
                    view["cwd"] = params["cwd"]
                made = await self._ask_editor(method, view)
                self._shown[name] = str(made["result"]["terminalId"])
            elif method == "terminal/release":
                view_id = self._shown.pop(str(params["terminalId"]), None)
                if view_id is not None:
                    release = {"sessionId": params["sessionId"], "terminalId": view_id}
                    await self._ask_editor(method, release)
        except (KeyError, TypeError, TimeoutError) as error:
            self._reporter.warning(f"the editor shows no terminal: {type(error).__name__}: {error}")

    def _renamed(self, message: Message) -> bool:
        try:
            return self._rename(message)
        except RecursionError:  # a hostile depth: the editor gets it as it came
            return False

    def _rename(self, value: Any) -> bool:
        """Replace terminals of the agent by those that show them, or by a text where there is none;
        return whether any was.
        """
        if isinstance(value, list):
            return sum(map(self._rename, value)) > 0  # each of them
        if not isinstance(value, dict):
            return False
        changed = sum(map(self._rename, value.values())) > 0
        name = value.get("terminalId")
        if value.get("type") != "terminal" or not is_terminal(name):
            return changed
        if (shown := self._shown.get(name)) is not None:
            value["terminalId"] = shown
        else:
            text = f"Terminal {name}: `criuctl attach {quoted(name)}` shows it."
            value.clear()
            value |= {"type": "content", "content": {"type": "text", "text": text}}
        return True


def _parsed(line: bytes) -> Message:
    """Return a message; an empty one if it is none, which is passed on all the same."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _response(message: Message, **outcome: Any) -> Message:
    return {"jsonrpc": "2.0", "id": message.get("id"), **outcome}


def _error(error: CriuctlError | OSError) -> Message:
    known = error if isinstance(error, CriuctlError) else of_the_host(error)
    if known is None:
        return {"code": _INTERNAL, "message": f"a bug in criuctl: {error}"}
    code = _NOT_FOUND if known.exit_code == 3 else _INTERNAL
    return {"code": code, "message": known.message, "data": known.to_dict()}

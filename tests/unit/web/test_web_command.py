"""`criuctl ui` as a command: where it listens, and how a desktop's browser gets the address."""

from __future__ import annotations

import queue
import socket
import stat
import webbrowser
from pathlib import Path

import pytest
from support.neighbour import as_neighbour

from criuctl.cli.commands.ui import _shown_in_browser
from criuctl.cli.main import main
from criuctl.config import Config
from criuctl.web.server import _limits


def test_other_machines_are_let_in_on_demand_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "--listen", "0.0.0.0:0"]) == 2
    assert "ssh -L" in capsys.readouterr().err
    assert main(["ui", "--listen", "somewhere"]) == 2


def test_what_does_not_work_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when a user has opened the page, and presses a button."""
    state = tmp_path / "state"
    (state / "sessions").mkdir(parents=True)
    state.chmod(0o700)
    monkeypatch.setenv("CRIUCTL_STATE_DIR", str(state))
    monkeypatch.setenv("CRIUCTL_RUN_DIR", str(tmp_path / "run"))
    assert as_neighbour(lambda: main(["ui", "--listen", "127.0.0.1:0"])) == "returned 13"
    said = as_neighbour(lambda: list(_limits(Config())))
    assert "not run as root" in said and "restore will fail" in said
    assert list(_limits(Config())) == []


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["ui", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == 9
    captured = capsys.readouterr()
    assert "127.0.0.1:0" in captured.err and captured.out == ""


def test_the_token_is_in_no_argument_list(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    with _shown_in_browser("http://127.0.0.1:1/#token=a-secret"):
        url = opened.get(timeout=60)
        file = Path(url.removeprefix("file://"))
        assert "secret" not in url and stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "url=http://127.0.0.1:1/#token=a-secret" in file.read_text()
    assert not file.exists()

"""The hooks that are there to be copied do what their first lines say."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.hooking import HookFolder

from criuctl.config import Config
from criuctl.errors import Vetoed
from criuctl.hooks import HookResult, Hooks
from criuctl.hooks.contract import PHASES
from criuctl.report import Reporter

EXAMPLES = Path(__file__).parents[3] / "hooks" / "examples"
FAILED = {
    "target": "web",
    "store": "/s",
    "error": {"code": "dump-failed", "exit_code": 5, "message": "CRIU said no", "hint": "Wait."},
}


def install(hooks: HookFolder, phase: str, name: str) -> None:
    (hooks.path / phase).mkdir(exist_ok=True)
    shutil.copy(EXAMPLES / phase / name, hooks.path / phase / name)


def run(config: Config, phase: str, **facts: object) -> HookResult:
    hooks = Hooks(config, Reporter(), dict(facts))
    hooks.run(phase)
    return hooks.results[0]


def test_examples_do_not_run_where_they_are() -> None:
    assert not [phase for phase in PHASES if (EXAMPLES.parent / phase).exists()]
    programs = [path for path in EXAMPLES.glob("*/*") if path.parent.name in PHASES]
    assert len(programs) >= 3
    assert all(os.access(path, os.X_OK) for path in programs)


def test_not_now(
    hooks: HookFolder, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(hooks, "pre-dump", "not-now")
    monkeypatch.setenv("CRIUCTL_NOT_NOW_DIR", str(tmp_path))
    config = replace(config, hook_env=("CRIUCTL_NOT_NOW_DIR",))
    assert run(config, "pre-dump", session="web").ok
    (tmp_path / "not-now.web").write_text("a backup is running\nsince noon\n")
    assert run(config, "pre-dump", session="db").ok
    with pytest.raises(Vetoed, match=r"a backup is running$"):
        run(config, "pre-dump", session="web")
    (tmp_path / "not-now").touch()
    with pytest.raises(Vetoed, match="not-now exists"):
        run(config, "pre-dump", session="db")


def test_mail(
    hooks: HookFolder, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(hooks, "snapshot-failed", "mail")
    sendmail = tmp_path / "bin" / "sendmail"
    sendmail.parent.mkdir()
    sendmail.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/mail\n')
    sendmail.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sendmail.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CRIUCTL_MAIL_TO", "ops@example.org")
    result = run(replace(config, hook_env=("CRIUCTL_MAIL_TO",)), "snapshot-failed", **FAILED)
    assert result.ok, result.error
    mail = (tmp_path / "mail").read_text()
    assert "To: ops@example.org" in mail
    assert "web could not be dumped" in mail
    assert "CRIU said no" in mail
    assert (tmp_path / "arguments").read_text() == "-t -oi\n"
    odd = {
        "code": "dump-failed",
        "exit_code": 5,
        "message": "/srv/caf\udce9 has changed",
        "hint": "",
    }
    result = run(
        replace(config, hook_env=("CRIUCTL_MAIL_TO",)),
        "snapshot-failed",
        target="cgroup:/a\nb",
        store="/s",
        error=odd,
    )
    assert result.ok, result.error
    mail = (tmp_path / "mail").read_text()
    assert "cgroup:/a b could not be dumped" in mail
    assert "/srv/caf\\udce9 has changed" in mail


class _Receiver(http.server.BaseHTTPRequestHandler):
    got: list[bytes] = []  # noqa: RUF012  # one receiver at a time
    status = 204

    def do_POST(self) -> None:
        self.got.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[http.server.HTTPServer]:
    """A web server that keeps what it is posted."""
    _Receiver.got, _Receiver.status = [], 204
    with http.server.HTTPServer(("127.0.0.1", 0), _Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_webhook(
    hooks: HookFolder,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    receiver: http.server.HTTPServer,
) -> None:
    install(hooks, "snapshot-failed", "webhook")
    file = tmp_path / "address"
    file.write_text(f"http://127.0.0.1:{receiver.server_port}/secret-path\n")
    monkeypatch.setenv("CRIUCTL_WEBHOOK_FILE", str(file))
    config = replace(config, hook_env=("CRIUCTL_WEBHOOK_FILE",))
    assert run(config, "snapshot-failed", **FAILED).data == {"status": 204}
    (posted,) = map(json.loads, _Receiver.got)
    assert (posted["target"], posted["error"], posted["phase"]) == (
        "web",
        FAILED["error"],
        "snapshot-failed",
    )
    _Receiver.status = 500
    assert "answered 500" in run(config, "snapshot-failed", **FAILED).error
    for address in ("http://127.0.0.1:1/secret-path", "http://127.0.0.1:1/a secret-path"):
        file.write_text(f"{address}\n")
        result = run(config, "snapshot-failed", **FAILED)
        assert "cannot be reached" in result.error
        assert "secret-path" not in str(result)


def test_the_contract_s_own_examples(hooks: HookFolder, config: Config, tmp_path: Path) -> None:
    text = (EXAMPLES.parent / "README.md").read_text()
    assert all(f"| `{phase}` |" in text for phase in PHASES)
    text = text.replace("/run/", f"{tmp_path}/")
    sh, python = (
        text.split(f"```{language}\n")[1].split("```")[0] for language in ("sh", "python")
    )
    hooks.file("pre-dump", "50-nightly", sh)
    hooks.file("post-restore", "50-announce", python)
    assert run(config, "pre-dump").ok
    (tmp_path / "nightly.lock").touch()
    with pytest.raises(Vetoed, match="the nightly job is running"):
        run(config, "pre-dump")
    assert run(config, "post-restore", pid=4711, labels={"role": "web"}).data == {"announced": 4711}
    assert (tmp_path / "web.pid").read_text() == "4711\n"

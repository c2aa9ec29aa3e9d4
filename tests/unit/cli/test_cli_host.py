"""The commands that look at this host and its processes; nothing is dumped here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from criuctl import __version__
from criuctl.cli.commands.doctor import _exit_codes
from criuctl.cli.main import main
from criuctl.errors import EXIT_CODES
from criuctl.ops import bug_report

Run = Callable[..., subprocess.CompletedProcess[str]]
FINDING = {"level", "code", "text", "hint", "pid", "fd"}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Folders of this test's own."""
    return {
        f"CRIUCTL_{name}": str(tmp_path / name.lower())
        for name in ("STORE", "STATE_DIR", "CACHE_DIR", "KEY_DIR")
    }


def test_version_names_all_that_takes_part(criuctl: Run) -> None:
    body = json.loads(criuctl("version", "--json").stdout)
    assert body["criuctl"] == __version__
    assert body["kernel"] == os.uname().release
    assert set(body) >= {"criu", "python", "arch", "formats"}
    assert body["python"] == sys.version.split()[0]
    text = criuctl("version").stdout
    assert f"criuctl  {__version__}\n" in text
    assert body["kernel"] in text
    assert criuctl("version", "-q").stdout == criuctl("--version").stdout.removeprefix("criuctl ")


def test_version_without_any_criu(criuctl: Run) -> None:
    done = criuctl("version", env={"CRIUCTL_CRIU": "/proc/nonexistent"})
    assert done.returncode == 0
    assert "none found" in done.stdout


def test_doctor_s_exit_code_follows_its_findings(criuctl: Run, env: dict[str, str]) -> None:
    for more, code in (({}, None), ({"CRIUCTL_CRIU": "/proc/nonexistent"}, 13)):
        done = criuctl("doctor", "--json", env=env | more)
        body = json.loads(done.stdout)
        assert all(set(f) == FINDING for f in body["findings"])
        errors = [f for f in body["findings"] if f["level"] == "error"]
        assert body["ok"] == (not errors) == (done.returncode == 0)
        if code is not None:
            assert done.returncode == code


def test_doctor_tells_a_store_that_does_not_answer_by_its_own_code(
    criuctl: Run, env: dict[str, str]
) -> None:
    elsewhere = {
        "CRIUCTL_STORE": "s3://bucket/x",
        "CRIUCTL_S3_ENDPOINT": "http://127.0.0.1:9",
        "CRIUCTL_S3_RETRIES": "1",
    }
    secrets = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "hush-hush",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    done = criuctl("doctor", "--json", "-vv", env=env | elsewhere | secrets)
    errors = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "error"]
    assert "store-unreachable" in [f["code"] for f in errors]
    assert done.returncode in (7, 13)  # 13 where this host's CRIU or kernel is found wanting first
    assert "hush-hush" not in done.stdout + done.stderr


def test_every_exit_code_of_the_doctor_is_in_the_contract() -> None:
    assert set(_exit_codes().values()) <= set(EXIT_CODES)
    assert _exit_codes()["store-unreachable"] == 7


def test_check_looks_at_a_live_tree_and_leaves_it_alone(criuctl: Run, env: dict[str, str]) -> None:
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere) as child:
        try:
            done = criuctl("check", str(child.pid), "--json", env=env)
            body = json.loads(done.stdout)
            assert set(body) == {"ok", "findings"}
            assert all(set(f) == FINDING for f in body["findings"])
            errors = [f for f in body["findings"] if f["level"] == "error"]
            assert body["ok"] == (not errors)
            assert done.returncode == (4 if errors else 0)
            text = criuctl("check", str(child.pid), env=env).stdout
            assert text.splitlines()[-1].startswith(
                f"{child.pid} (python, 1 process) {'can' if body['ok'] else 'cannot'} be dumped: "
            )
            assert child.poll() is None
            for store, code in (("/proc/none", "store"), (env["CRIUCTL_STORE"], "no-such-bucket")):
                body = json.loads(
                    criuctl("check", str(child.pid), "--store", store, "--json", env=env).stdout
                )
                assert [f["level"] for f in body["findings"] if f["code"] == code] == [
                    "error" if store == "/proc/none" else "info"
                ]
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("target", "code", "error"),
    [
        ("4194000", 3, "no-such-process"),
        ("nobody", 3, "not-found"),
        ("no/body", 2, "invalid-name"),
        ("unit:none.service", 3, "not-found"),
    ],
)
@pytest.mark.parametrize("command", ["check", "dump"])
def test_a_target_that_is_none(
    criuctl: Run, env: dict[str, str], command: str, target: str, code: int, error: str
) -> None:
    done = criuctl(command, target, "--json", env=env)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (code, error)


def test_what_can_never_be_dumped_is_a_finding_like_any_other(
    criuctl: Run, env: dict[str, str]
) -> None:
    """A tree that criuctl is a part of, and that of PID 1: who reads ``findings`` at exit code 4
    finds them.
    """
    for pid in (os.getpid(), 1):
        done = criuctl("check", str(pid), "--json", env=env)
        body = json.loads(done.stdout)
        assert (done.returncode, body["ok"]) == (4, False)
        (found,) = body["findings"]
        assert set(found) == FINDING and (found["level"], found["code"], found["pid"]) == (
            "error",
            "preflight",
            pid,
        )
        assert criuctl("check", str(pid), env=env).stdout.endswith(
            f"{pid} cannot be dumped: 1 error, 0 warnings\n"
        )


def test_snapshot_goes_on_after_a_failure_and_ends_with_it(
    criuctl: Run, env: dict[str, str]
) -> None:
    done = criuctl("snapshot", "4194000", "nobody", "--json", env=env)
    assert done.returncode == 3
    assert sorted((o["target"], o["error"]["code"]) for o in json.loads(done.stdout)) == [
        ("4194000", "no-such-process"),
        ("nobody", "not-found"),
    ]
    text = criuctl("snapshot", "4194000", "nobody", env=env)
    assert text.stdout == ""
    assert sorted(
        line.split(":")[1].strip()
        for line in text.stderr.splitlines()
        if line.startswith("criuctl")
    ) == [
        "4194000",
        "nobody",
    ]
    nothing = criuctl("snapshot", "--all", env=env)
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (
        0,
        "",
        "no session runs on this host\n",
    )


def test_a_page_that_is_not_finished_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_config: object) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(bug_report, "report", interrupted)
    assert main(["doctor", "--report", str(tmp_path / "page.md")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_of_a_label_that_nothing_bears(
    criuctl: Run, env: dict[str, str], tmp_path: Path
) -> None:
    env |= {"CRIUCTL_RUN_DIR": str(tmp_path / "run")}
    done = criuctl("snapshot", "--label", "tier=prdo", env=env)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "no session with the label tier=prdo runs on this host\n"

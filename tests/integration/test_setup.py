"""Set-up on the machine that runs the tests, the probe that chooses a CRIU, and the quickstart
(clean machines: setup-test).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.keeper import wait_until

pytestmark = pytest.mark.integration

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PREFIX = Path(os.environ.get("CRIUCTL_PREFIX", "/opt/criuctl"))


def run(*argv: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*argv],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def probe(*criu: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, SCRIPTS / "lib/probe_criu.py", *criu)


def leftovers() -> set[str]:
    """Folders of probes and quickstarts, and firewall tables of CRIU's."""
    folders = [
        *Path("/dev/shm").glob("criuctl-probe-*"),
        *Path("/tmp").glob("criuctl-quickstart-*"),
    ]
    tables = run("nft", "list", "tables").stdout.splitlines()
    return {str(folder) for folder in folders} | {table for table in tables if "CRIU" in table}


def nothing_left(before: set[str]) -> None:
    """What is new goes away: tables of dumps that run next to this test come and go."""
    wait_until(lambda: leftovers() <= before, 60, "nothing is left")


def test_the_recorded_criu_works_and_the_probe_leaves_nothing() -> None:
    record = json.loads((PREFIX / "criu.json").read_text())
    before = leftovers()
    done = probe(*record["argv"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    nothing_left(before)
    assert (
        run(*record["argv"], "--version").stdout.splitlines()[0] == f"Version: {record['version']}"
    )
    assert (Path(record["pycriu"]) / "pycriu/images").is_dir()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(None, "cannot be started", id="not there"),
        pytest.param("exit 1", "`criu check` fails", id="check fails"),
        pytest.param(
            'case "$*" in *check*) exit 0;; esac; echo "Error (a.c): RLIMIT_NOFILE"; echo "Error '
            '(b.c): the cause"; exit 1',
            "`criu dump` fails: Error (b.c): the cause",
            id="check passes, dump fails",
        ),
        pytest.param(
            'case "$*" in *check*) exit 0;; esac; while [ "$1" != --tree ]; do shift; done; kill '
            '-9 "$2"',
            "did not survive",
            id="kills what it is to leave running",
        ),
    ],
)
def test_a_criu_that_does_not_work_is_distinguished_from_one_that_does(
    tmp_path: Path, script: str | None, reason: str
) -> None:
    criu = tmp_path / "criu"
    if script is not None:
        criu.write_text(f"#!/bin/sh\n{script}\n")
        criu.chmod(0o755)
    before = leftovers()
    done = probe(criu)
    assert done.returncode == 3, done.stderr
    assert reason in done.stdout
    nothing_left(before)


def test_a_second_set_up_has_nothing_to_do_and_is_quick() -> None:
    assert run(SCRIPTS / "setup").returncode == 0
    begin = time.monotonic()
    done = run(SCRIPTS / "setup")
    assert done.returncode == 0, done.stderr
    assert "install" not in done.stdout
    # a few seconds where nothing else runs; a set-up with something to do takes minutes
    assert time.monotonic() - begin < 60


def test_the_command_imports_nothing_of_its_callers(tmp_path: Path) -> None:
    """As one who works in a Python environment of his own has set these variables."""
    assert run(SCRIPTS / "setup").returncode == 0
    (tmp_path / "json.py").write_text("raise SystemExit('somebody else's json')\n")
    done = subprocess.run(
        [PREFIX / "venv/bin/criuctl", "version", "--json"],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(tmp_path),
            "PYTHONHOME": "/proc/nonexistent",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["criuctl"]


def test_the_quickstart_does_what_it_says() -> None:
    before = leftovers()
    done = run(SCRIPTS / "quickstart")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"request -> (\d+)", done.stdout) == ["1", "2", "3"]
    nothing_left(before)

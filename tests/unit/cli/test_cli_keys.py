"""``criuctl key`` as a person uses it: what it prints, what it asks, and how it ends."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest
from support.program import CRIUCTL, clean_environment

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folders = {
        f"CRIUCTL_{name}_DIR": str(tmp_path / name.lower()) for name in ("STATE", "CACHE", "KEY")
    }
    return {"CRIUCTL_STORE": str(tmp_path / "store"), **folders}


def test_a_lost_key_file_is_made_up_for_by_the_recovery_key(
    criuctl: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    assert criuctl("store", "init", "--encrypt", env=environment).returncode == 0
    done = criuctl("key", "recovery", env=environment)
    paper = done.stdout.strip()
    assert re.fullmatch(r"([A-Z]{6}-){7}[A-Z]{6}", paper) and "shown only now" in done.stderr
    (file,) = (tmp_path / "key").iterdir()
    file.unlink()
    lost = criuctl("list", env=environment)
    assert lost.returncode == 7 and "CRIUCTL_RECOVERY_KEY" in lost.stderr
    wrong = paper[:8] + ("B" if paper[8] == "A" else "A") + paper[9:]
    (tmp_path / "typed").write_text(f"{wrong}\n")
    with (tmp_path / "typed").open() as stdin:
        typed = criuctl("key", "add", env=environment | {"CRIUCTL_KEY_FILE": "-"}, stdin=stdin)
    assert (
        typed.returncode == 8 and "mistyped: group 2 is wrong" in typed.stderr and not file.exists()
    )
    child = pexpect.spawn(
        CRIUCTL[0],
        [*CRIUCTL[1:], "key", "add", "--label", "new"],
        env=clean_environment(**environment, CRIUCTL_KEY_FILE="-"),
    )
    child.logfile_read = seen = io.BytesIO()
    try:
        child.expect("Recovery key of the store: ", timeout=120)
        child.sendline(paper.lower().replace("-", " "))
        child.expect(pexpect.EOF, timeout=120)
        child.wait()
        assert child.exitstatus == 0 and b"3 keys now open the store" in seen.getvalue()
        assert paper[:6].lower().encode() not in seen.getvalue().lower()
    finally:
        child.close(force=True)
    listed = criuctl("key", "list", env=environment)
    assert (
        re.search(r"file +new +\S.* in use here", listed.stdout)
        and listed.stdout.count("recovery") == 1
    )
    old = next(
        one
        for one in json.loads(criuctl("key", "list", "--json", env=environment).stdout)
        if one["label"] == ""
    )
    removed = criuctl("key", "remove", old["fingerprint"][:10], env=environment)
    assert removed.returncode == 0 and "can still read" in removed.stdout
    assert "2 keys" in criuctl("store", "info", env=environment).stdout
    assert criuctl("key", "remove", "nobody", env=environment).returncode == 3

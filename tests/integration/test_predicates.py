"""What a checkpoint requires: noted at the dump, checked before anything starts, and no stranger's
command is run for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import Criuctl
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def test_a_stale_checkpoint_is_refused_with_every_reason(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, tmp_path: Path
) -> None:
    animal = zoo.launch("counter.py")
    schema, token, ran = (tmp_path / name for name in ("schema.sql", "token", "ran"))
    schema.write_text("create table a (b int);")
    token.touch()
    report = trip.snapshot(
        animal,
        *("--name", "db", "--require", f"file:{schema}", "--require", f"command:test -e {token}"),
        *("--require", f"output:echo x >> {ran}; wc -c < {schema}", "--require", "age:1d"),
    )
    assert len(report["requires"]) == 4
    assert [p["state"] for p in criuctl("show", "db")["predicates"]] == [
        "holds",
        "unchecked",
        "unchecked",
        "holds",
    ]
    assert ran.read_text() == "x\n"  # at the dump; to show it is not run
    assert criuctl("restore", "db", "--as", "other", "--dry-run")["ok"] is True
    assert ran.read_text() == "x\nx\n"
    # another host: nothing of this one's but the store
    elsewhere = {"CRIUCTL_STATE_DIR": str(tmp_path / "elsewhere")}
    strange = criuctl("restore", "db", "--dry-run", check=False, env=elsewhere)
    assert (
        strange["exit_code"],
        [f["code"] for f in strange["findings"] if f["level"] == "error"],
    ) == (4, ["unchecked"] * 2)
    assert ran.read_text() == "x\nx\n"
    elsewhere["CRIUCTL_PREDICATES"] = json.dumps(
        {"none": [r for r in report["requires"] if r.startswith(("command", "output"))]}
    )
    assert criuctl("restore", "db", "--as", "other", "--dry-run", env=elsewhere)["ok"] is True

    schema.write_text("create table a (b int, c text);")
    token.unlink()
    planned = criuctl("restore", "db", "--as", "other", "--dry-run", check=False)
    assert (planned["exit_code"], planned["ok"]) == (4, False)
    refused = criuctl("restore", "db", "--as", "other", check=False)
    assert refused["exit_code"] == 4
    assert [f["code"] for f in refused["error"]["findings"]] == ["stale"] * 3
    for reason in (
        "was 23 bytes at the dump and is 31 now",
        "ended with 1",
        "prints something else",
    ):
        assert reason in refused["error"]["message"]
    assert "other" not in [s["session"] for s in criuctl("ls")]
    forced = criuctl("restore", "db", "--as", "other", "--force")
    assert sum("stale" in warning for warning in forced["warnings"]) == 3
    zoo.adopt(forced["pid"], animal).end()

    refused = criuctl("dump", animal.pid, "--require", f"file:{token}", check=False)  # not so now
    assert (refused["exit_code"], str(token) in refused["error"]["message"]) == (4, True)
    assert animal.ask()["counter"] == 1

"""Runbooks: every line of them that a test can run is run, in the trouble that they are for."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.command import Criuctl
from support.zoo import Zoo

from criuctl.checkpoint.repository import Repository
from criuctl.cli import topics
from criuctl.cli.main import cli
from criuctl.store import open_store

pytestmark = pytest.mark.integration


def follow(criuctl: Criuctl, runbook: str, **variables: str | Path) -> list[tuple[str, int]]:
    """Do what the runbook says, line by line; the lines that ended with another exit code than
    0.
    """
    program = criuctl.home.path / "bin" / "criuctl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m criuctl "$@"\n')
    program.chmod(0o755)
    environment = criuctl.environment() | {name: str(value) for name, value in variables.items()}
    environment["PATH"] = f"{program.parent}:{environment['PATH']}"
    found = []
    for line in steps(runbook):
        out = criuctl.home.path / "step.out"
        with out.open("wb") as file:
            running = criuctl.keeper.spawn(
                ["sh", "-c", line], env=environment, cwd=criuctl.home.path, stdout=file, stderr=file
            )
        code = running.wait(120)
        print(f"$ {line}\n{out.read_text()}[{code}]")
        if code:
            found.append((line, code))
    return found


def steps(runbook: str) -> list[str]:
    """The lines of its blocks that are fenced as sh."""
    lines, wanted = [], False
    for line in topics.text(runbook).splitlines():
        if line.startswith("```"):
            wanted = line == "```sh"
        elif wanted:
            lines.append(line)
    return lines


def filled(criuctl: Criuctl, *sessions: str) -> list[Path]:
    """Two checkpoints of each session in the store, a folder: the packs of each; they were never
    processes.
    """
    config = kit.config(criuctl.home.path, store=str(criuctl.store), workers=1)
    made: list[Path] = []
    with (
        open_store(config.store, config) as store,
        Repository.init(store, encryption=False, config=config) as repository,
    ):
        for number, session in enumerate(sessions):
            for turn in range(2):
                kit.write(
                    repository,
                    kit.Content(bytes([number, turn]) * 200_000, {"a.img": b"a"}),
                    session=session,
                )
                made += [path for path in packs(criuctl) if path not in made]
    assert len(made) == 2 * len(sessions)
    return made


def packs(criuctl: Criuctl) -> list[Path]:
    return [path for path in (criuctl.store / "packs").rglob("*") if path.is_file()]


def test_store_lost(criuctl: Criuctl) -> None:
    newest = filled(criuctl, "web", "db")[-1]  # of the second checkpoint of db only
    exported = criuctl.home.path / "db.criuctl"
    criuctl("export", "db", exported)
    content = bytearray(newest.read_bytes())
    content[40] ^= 1  # in its first chunk
    newest.write_bytes(content)
    assert criuctl("verify", "db@2", check=False)["exit_code"] == 8
    new = criuctl.home.path / "new"
    missed = follow(criuctl, "store-lost", NEW_STORE=new, EXPORTED=exported, DAMAGED="db@2")
    assert missed == [("criuctl verify --all", 8)]  # the first time
    assert [one["number"] for one in criuctl("list", "--store", new)] == [1]


def test_key_lost(criuctl: Criuctl) -> None:
    criuctl("store", "init", "--encrypt")
    stick = criuctl.home.path / "stick"
    stick.mkdir()
    assert (
        criuctl("store", "key", check=False, env={"CRIUCTL_KEY_DIR": str(stick)})["exit_code"] == 7
    )
    assert follow(criuctl, "key-lost", NEW_STORE=criuctl.home.path / "new", STICK=stick) == []
    assert criuctl("list", env={"CRIUCTL_KEY_FILE": str(stick / "this-host.key")}) == []


def test_disk_full(criuctl: Criuctl) -> None:
    filled(criuctl, "web", "db", "cron")
    for session in ("db", "cron"):
        criuctl("rm", f"{session}@1")
    assert follow(criuctl, "disk-full", NEW_STORE=criuctl.home.path / "new", SESSION="web") == []
    assert {(one["session"], one["number"]) for one in criuctl("list")} == {
        ("web", 2),
        ("db", 2),
        ("cron", 2),
    }
    assert packs(criuctl)


def test_fenced_host_and_restore_refused(criuctl: Criuctl, zoo: Zoo) -> None:
    animal = zoo.launch("memory.py", "4")
    criuctl("dump", animal.pid, "--name", "beast")
    assert follow(criuctl, "restore-refused", SESSION="beast") == []
    assert follow(criuctl, "fenced-host", SESSION="beast") == []


def test_every_runbook_is_found() -> None:
    names = topics.runbooks()
    assert names == ["disk-full", "fenced-host", "key-lost", "restore-refused", "store-lost"]
    for name in names:
        written = topics.text(name)
        assert all(
            line.startswith(("criuctl ", "CRIUCTL_")) and shlex.split(line) for line in steps(name)
        ) and steps(name)
        assert topics.title(name) and all(len(line) <= 100 for line in written.splitlines())
        assert name in (cli.help or "")

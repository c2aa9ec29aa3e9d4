"""Records of commands, how one is typed, and the environment of one that is not typed."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from criuctl.session.holder.command_files import without_hooks
from criuctl.session.holder.commands import NEW, SHELL, Command, Commands
from criuctl.session.holder.event_loop import Loop
from criuctl.session.holder.master import COMMAND, Chunk, Master
from criuctl.session.holder.operators import Refused
from criuctl.session.holder.shell_commands import escaped
from criuctl.session.launch.shell_hooks import hooked
from criuctl.session.screen.modes import Modes


def test_the_life_of_a_record() -> None:
    commands, changes = Commands(), list[Command]()
    commands.on_change = changes.append
    one = commands.add(SHELL, ["true"], {"name": "x"})
    assert not one.begun and commands.running(SHELL) == [one] and commands.running(NEW) == []
    commands.begin(one, 10)
    commands.begin(one, 11)
    assert one.begun and one.begin == 10
    commands.finish(one, 3, 20)
    commands.finish(one, 4, 30)
    assert (one.state, one.exit_code, one.end) == ("done", 3, 20) and changes == [one, one]
    two = commands.add(SHELL, ["true"], {})
    commands.finish(two, 130, 40)
    assert two.report()["state"] == "interrupted" and two.report()["exit_code"] is None
    assert two.begin == 40
    with pytest.raises(Refused):
        commands.get("c9")
    three = commands.add(SHELL, ["true"], {})
    commands.discard(three)
    assert commands.find(three.id) is None and three.id in commands.discarded


def test_a_bounded_number_of_ended_commands_is_kept() -> None:
    commands = Commands()
    first = commands.add(SHELL, ["sleep"], {})
    for _ in range(150):
        commands.finish(commands.add(SHELL, ["true"], {}), 0, 1)
    commands.add(SHELL, ["true"], {})
    known = commands.all()
    assert len(known) == 102 and known[0] is first and known[-1].id == "c152"


def test_a_frame_holds_all_records() -> None:
    commands = Commands()
    for _ in range(110):
        commands.finish(commands.add(SHELL, ["printf", "\x01" * 100_000, "more"], {}), 0, 1)
    assert len(json.dumps(commands.to_dict())) < 500_000
    (word,) = commands.all()[-1].report()["argv"][1:]
    assert word.endswith("\x01...") and len(word) < 600


def test_an_older_checkpoint_brings_its_records_back() -> None:
    """A command that had ended since runs again; later ones keep their records."""
    commands = Commands()
    one = commands.add(NEW, ["make"], {})
    commands.begin(one, 0)
    state: dict[str, Any] = commands.to_dict()
    state["records"][0]["unknown"] = "of a newer version"
    commands.finish(one, 0, 9)
    later = commands.add(SHELL, ["true"], {})
    commands.restore(state)
    assert commands.get(one.id).state == "running" and commands.find(later.id) is later
    assert commands.add(SHELL, ["true"], {}).id == "c3"


@pytest.mark.parametrize(
    "text", [b"plain text", b"a\tb\nc\\d'e\"f!$`%", "é".encode(), bytes(range(1, 256))]
)
def test_text_for_printf(text: bytes) -> None:
    """Every byte survives, none could be taken for a key."""
    sent = escaped(text)
    assert all(0x20 <= byte < 0x7F for byte in sent)
    for shell in ("bash", "zsh"):
        command = [shell, "-c", 'printf %b "$1"', shell, sent.decode()]
        got = subprocess.run(command, stdout=subprocess.PIPE, env={"LC_ALL": "C"}, check=True)
        assert got.stdout == text


@pytest.mark.parametrize("shell", ["bash", "bash --login", "bash --norc", "zsh", "fish", "dash"])
def test_an_environment_without_hooks(shell: str) -> None:
    for more in ({}, {"PS1": "$ ", "ENV": "rc", "ZDOTDIR": "/z", "PROMPT_COMMAND": "true"}):
        env = {"HOME": "/home/me", "PATH": "/bin", **more}
        found = hooked(shell.split(), env, "ab12")
        assert found is not None and without_hooks(found.env) == env
        assert without_hooks(env) == env


def test_the_parts_of_a_command_come_before_other_input(tmp_path: Any) -> None:
    from criuctl.session.holder.output_log import OutputLog

    read, write = os.openpty()
    master = Master(Loop(), OutputLog(tmp_path / "output"), Modes())
    master.open(read)
    master.reserve()
    master.put(Chunk(b"typed\n", {}, "human"))
    master.put(Chunk(b"key\n", {}, COMMAND))
    assert os.read(write, 100) == b"key\n" and master.unread
    master.put(Chunk(b"command\n", {}, COMMAND))
    assert os.read(write, 100) == b"command\n"
    assert [chunk.data for chunk in master.queue] == [b"typed\n"]
    master.release()
    assert os.read(write, 100) == b"typed\n" and not master.queue
    os.close(write)

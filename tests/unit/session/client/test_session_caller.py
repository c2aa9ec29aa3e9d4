"""Which operator a command line is."""

from __future__ import annotations

import os

import pytest

from criuctl.errors import UsageError
from criuctl.session.client import caller


@pytest.mark.parametrize("at_terminal", [None, 0, 1, 2])
def test_a_command_is_a_human_s_at_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, at_terminal: int | None
) -> None:
    monkeypatch.delenv(caller.KIND, raising=False)
    monkeypatch.setattr(os, "isatty", lambda fd: fd == at_terminal)
    assert caller.kind() == ("service" if at_terminal is None else "human")
    monkeypatch.setenv(caller.KIND, "agent")
    assert caller.kind() == "agent"


def test_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(caller.KIND, "robot")
    with pytest.raises(UsageError, match="'robot' is no kind"):
        caller.kind()


def test_the_name_is_the_user_s_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (caller.NAME, "SUDO_USER", "LOGNAME", "USER"):
        monkeypatch.delenv(variable, raising=False)
    assert caller.name() == f"uid-{os.getuid()}"
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setenv(caller.NAME, "builder" * 20)
    assert caller.name() == ("builder" * 20)[:64]

"""Each outcome of several is printed as soon as it is known, and stdout is one JSON value however
the command ends.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator

import pytest

from criuctl.cli.app import App
from criuctl.cli.descriptions import print_each
from criuctl.cli.main import main
from criuctl.errors import Conflict
from criuctl.host import lost_homes


def _outcomes(number: int, ending: BaseException | None, closed: list[bool]) -> Iterator[int]:
    try:
        yield from range(number)
        if ending is not None:
            raise ending
    finally:
        closed.append(True)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_array_grows_line_by_line(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    codes = print_each(
        App(json=True), _outcomes(number, None, []), lambda one: one + 2, lambda one: {"one": one}
    )
    out = capsys.readouterr().out
    assert json.loads(out) == [{"one": n} for n in range(number)]
    assert [json.loads(line[1:]) for line in out.splitlines()[:-1]] == json.loads(out)
    assert codes == [n + 2 for n in range(number)]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("ending", "code"), [(Conflict("busy"), 9), (FULL, 13), (KeyboardInterrupt(), 130)]
)
def test_what_ends_it_is_the_last_element(
    ending: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = print_each(
        App(json=True), _outcomes(2, ending, []), lambda _: 0, lambda one: {"one": one}
    )
    outcomes = json.loads(capsys.readouterr().out)
    assert (codes, outcomes[-1]["error"]["exit_code"]) == ([0, 0, code], code)
    # nothing printed, or for people: that is for the program's boundary
    for app, number in ((App(json=True), 0), (App(), 2)):
        with pytest.raises(type(ending)):
            print_each(app, _outcomes(number, ending, []), lambda _: 0, lambda one: one)
    assert capsys.readouterr().out == ""


def test_a_reader_that_has_gone_ends_what_is_under_way() -> None:
    def gone(_one: int) -> int:
        raise BrokenPipeError

    closed: list[bool] = []
    with pytest.raises(BrokenPipeError):
        print_each(App(), _outcomes(2, None, closed), gone, lambda one: one)
    assert closed == [True]


def test_an_ended_copy_is_reported_also_when_a_signal_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*_args: object, **_options: object) -> Iterator[lost_homes.StandDown]:
        yield lost_homes.StandDown("web", "fenced", "ended", 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(lost_homes, "stand_down", found)
    assert main(["fence", "--all", "--json"]) == 130
    outcomes = json.loads(capsys.readouterr().out)
    assert (outcomes[0]["session"], outcomes[0]["done"], outcomes[1]["error"]["exit_code"]) == (
        "web",
        "ended",
        130,
    )


def test_a_bug_after_the_first_outcome_leaves_one_json_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*_args: object, **_options: object) -> Iterator[lost_homes.StandDown]:
        yield lost_homes.StandDown("web", "fenced", "ended", 3)
        raise RuntimeError("a bug")

    monkeypatch.setattr(lost_homes, "stand_down", found)
    assert main(["fence", "--all", "--json"]) == 1
    said = capsys.readouterr()
    assert [body["session"] for body in json.loads(said.out)] == ["web"]
    assert "this is a bug in criuctl" in said.err

"""The journal of steps: what was acknowledged is there, whatever happens to the file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from criuctl.steps import journal
from criuctl.steps.journal import Journal, JournalDamaged
from criuctl.steps.states import Step, StepRefused, done, key_of

SESSION = "ab" * 16


def step(id: str, **more: object) -> Step:
    return replace(Step(id, "once", "began", key_of(SESSION, id), "t1"), **more)  # type: ignore[arg-type]


def opened(tmp_path: Path, session: str = SESSION) -> Journal:
    return Journal(tmp_path / "steps", session)


def test_what_was_put_is_there(tmp_path: Path) -> None:
    first = opened(tmp_path)
    one = first.put("began", step("one"))
    two = first.put("began", step("two"))
    two = first.put("done", done(two, "t1", {"a": [1, "é"]}, verified=False, now=2.0))
    first.close()
    again = opened(tmp_path)
    assert (again.get("one"), again.get("two"), again.get("three")) == (one, two, None)
    assert (again.sequence, again.cut) == (3, 0)
    assert again.counts == {"began": 1, "done": 1, "failed": 0, "unknown": 0}
    assert again.began == {"one"}
    assert [(n, s.id) for n, s in again.steps()] == [(1, "one"), (3, "two")]
    assert [s.id for _, s in again.steps(since=1)] == ["two"]
    assert (tmp_path / "steps").stat().st_mode & 0o777 == 0o600


def test_it_is_on_the_disk_before_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = opened(tmp_path)
    calls: list[str] = []
    real_write, real_sync = os.write, os.fsync

    def write(fd: int, data: bytes) -> int:
        calls.append("write")
        return real_write(fd, data)

    def sync(fd: int) -> None:
        calls.append("fsync")
        real_sync(fd)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", sync)
    written.put("began", step("one"))
    assert calls == ["write", "fsync"]


def test_a_crash_at_every_byte_of_a_record(tmp_path: Path) -> None:
    whole = opened(tmp_path)
    whole.put("began", step("one"))
    before = (tmp_path / "steps").stat().st_size
    whole.put("began", step("two"))
    whole.close()
    data = (tmp_path / "steps").read_bytes()
    for end in range(before, len(data)):
        (tmp_path / "steps").write_bytes(data[:end])
        torn = opened(tmp_path)
        assert (torn.get("two"), torn.cut, torn.sequence) == (None, end - before, 1)
        assert torn.get("one") is not None
        torn.put("began", step("three"))
        torn.close()
        again = opened(tmp_path)
        assert (again.cut, [s.id for _, s in again.steps()]) == (0, ["one", "three"])
        again.close()


@pytest.mark.parametrize("rest", [b"\0" * 4096, b"\n\n", b"garbage\nmore", b"x" * 40 + b"\n"])
def test_garbage_behind_the_last_record_is_cut_off(tmp_path: Path, rest: bytes) -> None:
    opened(tmp_path).put("began", step("one"))
    with (tmp_path / "steps").open("ab") as file:
        file.write(rest)
    assert opened(tmp_path).cut == len(rest)


def test_damage_in_the_middle_is_refused_and_kept(tmp_path: Path) -> None:
    written = opened(tmp_path)
    places = []
    for number in range(4):
        places.append((tmp_path / "steps").stat().st_size)
        written.put("began", step(f"s{number}"))
    data = bytearray((tmp_path / "steps").read_bytes())
    for place in (*range(places[1], places[2] - 1, 7), places[0] + 50):
        bad = bytearray(data)
        bad[place] ^= 1
        (tmp_path / "steps").write_bytes(bad)
        with pytest.raises(JournalDamaged):
            opened(tmp_path)
        assert (tmp_path / "steps").read_bytes() == bad
    without = data[: places[1]] + data[places[2] :]
    (tmp_path / "steps").write_bytes(without)
    with pytest.raises(JournalDamaged):
        opened(tmp_path)
    (tmp_path / "steps").write_bytes(b"x" + data[1:])
    with pytest.raises(JournalDamaged):
        opened(tmp_path)


@pytest.mark.parametrize("taken", [0, 1, 40])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    written = opened(tmp_path)
    written.put("began", step("one"))
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if not taken:
            raise OSError(28, "No space left on device")
        return real(fd, data[:taken])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            written.put("began", step("two"))
    assert written.get("two") is None and written.counts["began"] == 1
    written.put("began", step("three"))
    assert [s.id for _, s in opened(tmp_path).steps()] == ["one", "three"]


def test_a_disk_that_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = opened(tmp_path)
    written.put("began", step("one"))
    failures = [OSError(5, "Input/output error")]
    real = os.fsync

    def once(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", once)
        with pytest.raises(OSError, match="Input/output"):
            written.put("began", step("two"))
        written.put("began", step("three"))
        failures[:] = [OSError(5, "Input/output error")] * 2
        with pytest.raises(OSError, match="Input/output"):
            written.put("began", step("four"))
        with pytest.raises(OSError, match="cannot be written"):
            written.put("began", step("five"))
    assert [s.id for _, s in opened(tmp_path).steps()] == ["one", "three"]


def test_a_journal_of_another_session_is_kept_under_its_id(tmp_path: Path) -> None:
    opened(tmp_path, "cd" * 16).put("began", step("old"))
    assert opened(tmp_path).get("old") is None
    assert Journal(tmp_path / f"steps-{'cd' * 8}", "cd" * 16).get("old") is not None


def test_a_large_file_of_old_records_becomes_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_LARGE", 20_000)
    written = opened(tmp_path)
    written.replicate(True)
    first = written.put("began", step("first"))
    for number in range(1000):
        written.put("progress", step("busy", progress=number / 1000))
    assert (tmp_path / "steps").stat().st_size < 25_000
    again = opened(tmp_path)
    for known in (written, again):
        assert (known.sequence, known.replicated, known.get("first")) == (1002, True, first)
        assert [(n, s.progress) for n, s in known.steps()] == [(2, None), (1002, 0.999)]


def test_numbers_and_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_STEPS", 2)
    written = opened(tmp_path)
    written.put("began", step("one"))
    written.put("began", step("two"))
    with pytest.raises(StepRefused, match="takes no more"):
        written.put("began", step("three"))
    written.put("done", step("two", state="done"))
    with pytest.raises(StepRefused, match="too long"):
        written.put("done", step("two", result="x" * (128 << 10)))


def test_it_moves_with_its_session(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    written = Journal(tmp_path / "new" / "steps", SESSION)
    written.put("began", step("one"))
    opened(tmp_path, "cd" * 16).close()
    written.move(tmp_path)
    written.put("began", step("two"))
    assert [s.id for _, s in opened(tmp_path).steps()] == ["one", "two"]
    assert (tmp_path / f"steps-{'cd' * 8}").exists()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    Journal(tmp_path / "other", SESSION).close()
    (tmp_path / "steps").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        opened(tmp_path)

"""Which of two checkpoints is the newer one, what a host notes, and what it makes of what it cannot
read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support import checkpoints as kit

from criuctl.config import Config
from criuctl.host import latest_checkpoints
from criuctl.host.latest_checkpoints import Latest
from criuctl.report import Reporter
from criuctl.store.local import LocalStore

ONE = Latest("work", "5" * 32, "a" * 32, 3, 2, "2026-11-26T10:00:00.000Z", "/store")


@pytest.mark.parametrize(
    ("other", "newer"),
    [
        (replace(ONE, number=9, incarnation=9), False),  # the same one, wherever it lies
        (replace(ONE, checkpoint="b", number=4), True),
        # the clock was put back
        (replace(ONE, checkpoint="b", number=2, created="2027-01-01T00:00:00.000Z"), False),
        # another host's clock
        (
            replace(
                ONE, checkpoint="b", number=1, incarnation=3, created="2020-01-01T00:00:00.000Z"
            ),
            True,
        ),
        (replace(ONE, checkpoint="b", number=9, incarnation=1), False),
        (
            replace(
                ONE, checkpoint="b", number=1, store="s3://b", created="2026-11-26T10:00:01.000Z"
            ),
            True,
        ),
        (
            replace(
                ONE, checkpoint="b", number=9, store="s3://b", created="2026-11-26T09:59:59.000Z"
            ),
            False,
        ),
        (replace(ONE, checkpoint="b", store="s3://b", created="nonsense"), False),
    ],
)
def test_which_is_newer(other: Latest, newer: bool) -> None:
    assert other.newer_than(ONE) is newer
    if newer:
        assert not ONE.newer_than(other)


def test_what_is_noted_is_known_until_it_is_forgotten(tmp_path: Path) -> None:
    config, reporter = Config(state_dir=str(tmp_path)), Reporter()
    assert latest_checkpoints.known(config, "work") is None
    latest_checkpoints.note(config, ONE, reporter)
    assert (
        latest_checkpoints.known(config, "work") == ONE
        and latest_checkpoints.known(config, "works") is None
    )
    (file,) = (tmp_path / "latest").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    described = latest_checkpoints.described(
        config, "work", ONE.session, None, (latest_checkpoints.moment(ONE.created) or 0) + 60
    )
    assert described == {"id": ONE.checkpoint, "number": 3, "age_s": 60.0, "store": "/store"}
    assert latest_checkpoints.described(config, "work", "6" * 32, "c", 0) == {
        "id": "c",
        "number": None,
        "age_s": None,
        "store": None,
    }
    assert latest_checkpoints.described(config, "other", ONE.session, None, 0) is None
    file.write_text("{")
    assert latest_checkpoints.known(config, "work") is None
    latest_checkpoints.forget(config, "work")
    latest_checkpoints.forget(config, "work")
    assert not reporter.warnings


def test_what_cannot_be_noted_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reporter = Reporter()
    latest_checkpoints.note(Config(state_dir=str(tmp_path / "file")), ONE, reporter)
    (warning,) = reporter.warnings
    assert "could not be noted" in warning


def test_of_what_is_removed_here_the_rest_takes_the_place(tmp_path: Path) -> None:
    """But not of what was removed in another store, nor for a session of another id."""
    repo = kit.repository(tmp_path, store=LocalStore(str(tmp_path / "store")))
    made = [kit.write(repo) for _ in range(3)]
    config, reporter = repo.config, Reporter()
    summaries = repo.list("web")
    assert len(made) == len(summaries) == 3
    url = repo.store.url
    latest_checkpoints.note(config, Latest.of(summaries[2], "elsewhere"), reporter)
    latest_checkpoints.removed(config, repo, summaries[2:], reporter)
    assert latest_checkpoints.known(config, "web") == Latest.of(summaries[2], "elsewhere")
    latest_checkpoints.note(config, Latest.of(summaries[2], url), reporter)
    latest_checkpoints.removed(config, repo, summaries[:1], reporter)
    assert latest_checkpoints.known(config, "web") == Latest.of(summaries[2], url)
    for gone in (summaries[2], summaries[1]):
        repo.remove(gone)
    latest_checkpoints.removed(config, repo, summaries[1:], reporter)
    assert latest_checkpoints.known(config, "web") == Latest.of(summaries[0], url)
    repo.remove(summaries[0])
    latest_checkpoints.removed(config, repo, summaries[:1], reporter)
    assert latest_checkpoints.known(config, "web") is None

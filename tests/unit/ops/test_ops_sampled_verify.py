"""A part of a store is checked: which part, by chance that can be repeated, and whose the damage
is.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.program import CRIUCTL, run_program

from criuctl.checkpoint.reader import CheckpointReader
from criuctl.config import Config
from criuctl.ops.inspect import verify
from criuctl.ops.sampled_verify import Sample, verify_sample
from criuctl.report import Reporter
from criuctl.store.local import LocalStore

COUNT = 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of some checkpoints, each with a pack of its own; the last but one shares that of the
    last.
    """
    folder = tmp_path_factory.mktemp("sampled")
    with kit.repository(
        folder, encrypted=True, store=LocalStore(str(folder / "store"))
    ) as repository:
        for number in range(COUNT):
            content = kit.Content(
                memory=os.urandom(3 * kit.WINDOW),
                images={"a.img": b"%d" % number},
                file=os.urandom(999),
            )
            kit.write(repository, content, session=f"s{number}")
        kit.write(repository, content, session="twin")
    return folder


@pytest.fixture
def config(made: Path, tmp_path: Path) -> Config:
    shutil.copytree(made, tmp_path / "copy")
    return kit.config(tmp_path / "copy", store=str(tmp_path / "copy" / "store"))


def sample(config: Config, percent: float, seed: int | None = None) -> Sample:
    return verify_sample(config, percent, seed=seed, reporter=Reporter())


def packs(config: Config) -> list[Path]:
    """Largest first: those of the contents, then small ones with the other data of a checkpoint."""
    return sorted(Path(config.store).glob("packs/*/*"), key=lambda path: -path.stat().st_size)


def needed_by(found: Sample) -> list[set[str]]:
    return [{s.session for s in pack.needed_by} for pack in found.damaged]


class Interference(Reporter):
    """Something else happens to the store at the first event of one kind."""

    def __init__(self, kind: str, what: Callable[[], object]) -> None:
        super().__init__()
        self._kind, self._what = kind, what

    def _heard(self, kind: str) -> None:
        if kind == self._kind:
            self._kind = ""
            self._what()

    def step(self, name: str, **facts: object) -> None:
        self._heard("step" if name.startswith("verify") else "")

    def progress(self, *_: object) -> None:
        self._heard("progress")


@pytest.mark.parametrize("moment", ["step", "progress"])
def test_what_is_removed_while_all_is_verified_is_not_damaged(moment: str, config: Config) -> None:
    """By cron both go on at the same time; a nightly alarm would be the end of it."""

    def prune() -> None:
        manifests = sorted(Path(config.store).glob("checkpoints/*/*"))
        # and gc, without a grace time
        for path in (*manifests[: len(manifests) // 2], *packs(config)):
            path.unlink()

    verdicts = verify(config, None, reporter=Interference(moment, prune))
    bad = {
        str(Path(config.store) / v.summary.object)
        for v in verdicts
        if v.summary is not None and v.error is not None
    }
    there = {str(path) for path in Path(config.store).glob("checkpoints/*/*")}
    assert bad <= there
    assert len(bad) >= len(there) - 1  # their packs are gone; one may have been read by then


def test_what_is_chosen(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = CheckpointReader.open_pack

    def noting(self: CheckpointReader, name: str, *more: object) -> None:
        read.append(name)
        original(self, name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointReader, "open_pack", noting)
    whole = sample(config, 100)
    count = whole.of_packs
    assert (whole.packs, whole.bytes, whole.errors) == (count, whole.of_bytes, [])
    assert sorted(read) == sorted(str(path.relative_to(config.store)) for path in packs(config))
    chosen = Counter[str]()
    for seed in range(20):
        read.clear()
        found = sample(config, 25, seed)
        assert found.packs == len(read) == -(-count // 4)
        assert len(found.checkpoints) == COUNT + 1
        chosen.update(read)
        if seed == 7:
            again = read.copy()
            read.clear()
            sample(config, 25, 7)
            assert sorted(read) == sorted(again)
    assert len(chosen) == count  # each had its chance
    assert sample(config, 0.001).packs == 1


def test_damage_is_reported_with_the_checkpoints_that_need_it(config: Config) -> None:
    victim = packs(config)[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 3] ^= 1
    victim.chmod(0o600)
    victim.write_bytes(data)
    found = sample(config, 100)
    (bad,) = found.damaged
    assert bad.object == str(victim.relative_to(config.store))
    (names,) = needed_by(found)
    assert names in ({f"s{COUNT - 1}", "twin"}, *({f"s{n}"} for n in range(COUNT - 1)))
    assert {v.summary.session for v in found.checkpoints if v.error and v.summary} == names
    body = found.to_dict()
    assert body["ok"] is False
    assert body["damaged"][0]["error"]["exit_code"] == 8
    missing = packs(config)[1]
    missing.unlink()  # every sample reports it, however small
    found = sample(config, 0.001)
    assert [str(missing.relative_to(config.store))] == [
        b.object for b in found.damaged if b.error.code == "object-missing"
    ]
    assert all(needed_by(found))


def test_the_command(config: Config) -> None:
    env = {
        "CRIUCTL_STORE": config.store,
        "CRIUCTL_KEY_DIR": config.key_dir,
        "CRIUCTL_CACHE_DIR": config.cache_dir,
    }
    done = run_program(CRIUCTL, "verify", "--all", "--sample", "100%", "--seed", "5", env=env)
    assert done.returncode == 0, done.stderr
    assert "chosen by seed 5; every manifest read" in done.stdout
    assert f"{COUNT + 1} checkpoints, 0 not sound" in done.stdout
    lost = packs(config)[0]
    lost.unlink()
    done = run_program(CRIUCTL, "verify", "--all", "--sample", "1%", "-q", env=env)
    assert done.returncode == 7
    assert f"{lost.name} is missing from the store; needed by " in done.stdout
    for wrong in (["--sample", "0%"], ["--sample", "x"], ["--seed", "1"]):
        assert run_program(CRIUCTL, "verify", "--all", *wrong, env=env).returncode == 2

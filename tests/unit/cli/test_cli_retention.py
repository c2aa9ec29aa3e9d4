"""`criuctl prune`, `gc`, `pin` and `unpin` on a real store in a folder; checkpoints are written
without CRIU.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import checkpoints as kit

from criuctl.checkpoint import leases
from criuctl.checkpoint.manifest import SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.host.registry import Registry, SessionRecord
from criuctl.ops import kill
from criuctl.report import Reporter
from criuctl.store import open_store

Run = Callable[..., subprocess.CompletedProcess[str]]


class Site:
    """A store, this host's state, and a criuctl that is configured to use both."""

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self.run = path, run
        self.config = kit.config(
            path, store=str(path / "store"), state_dir=str(path / "state"), workers=1
        )
        Repository.init(
            open_store(self.config.store, self.config), encryption=False, config=self.config
        ).close()

    def repository(self) -> Repository:
        return Repository.open(open_store(self.config.store, self.config), self.config)

    def write(self, session: str, seed: int = 0, **more: Any) -> CheckpointSummary:
        return kit.write(
            self.repository(),
            kit.Content(bytes([seed]) * 300_000, {"a": b"a"}),
            session=session,
            **more,
        )

    def __call__(self, *args: str, code: int = 0, **env: str) -> Any:
        folders = {"STORE": "store", "STATE_DIR": "state", "CACHE_DIR": "cache", "KEY_DIR": "keys"}
        known = {f"CRIUCTL_{key}": str(self.path / name) for key, name in folders.items()}
        done = self.run(*args, "--json", env={**known, **env})
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def numbers(self, session: str) -> list[int]:
        return [s.number for s in self.repository().list(session)]


@pytest.fixture
def site(criuctl: Run, tmp_path: Path) -> Site:
    return Site(tmp_path, criuctl)


def test_prune_tells_the_rule_of_each_and_removes_the_rest(site: Site) -> None:
    for number in range(4):
        site.write("web", labels={"why": "upgrade"} if number == 0 else {})
    site.write("db")
    assert site("prune", code=2)["error"]["code"] == "usage"
    assert (
        site("prune", "nosuch", "--keep-last", "1", code=3)["error"]["code"] == "no-such-checkpoint"
    )
    site("pin", "web@2")
    wanted = ["prune", "web", "--keep-last", "1", "--keep-label", "why=upgrade"]
    plan = site(*wanted, "--dry-run")
    assert (plan["kept"], plan["removed"], site.numbers("web")) == (3, 1, [1, 2, 3, 4])
    rules = {one["number"]: one["rules"] for one in plan["checkpoints"]}
    assert rules == {4: ["last 1 of 1"], 3: [], 2: ["pinned"], 1: ["label why=upgrade"]}
    done = site(*wanted)
    assert (done["kept"], done["removed"], site.numbers("web"), site.numbers("db")) == (
        3,
        1,
        [1, 2, 4],
        [1],
    )
    assert site(*wanted)["removed"] == 0
    site("rm", "web@2", code=9)
    assert site("unpin", "web@2")[0]["pinned"] is False
    assert site(*wanted)["removed"] == 1 and site.numbers("web") == [1, 4]


def test_the_newest_of_a_session_that_would_be_brought_back_stays(site: Site) -> None:
    """Of a session of this host, and of one that lives on another, unless it is asked for."""
    ours = [site.write("web") for _ in range(3)]
    site.write("far")
    site.write("dead")
    Registry(site.config).put(
        SessionRecord("web", "ab" * 16, state="checkpointed", checkpoint=ours[1].id)
    )
    repository = site.repository()
    leases.claim(repository, "far", "ab" * 16, 1, host="f" * 32, host_name="elsewhere").keep()
    label = ["prune", "--keep-label", "none=such"]
    plan = site(*label, "--dry-run")
    assert {(one["session"], one["number"]) for one in plan["checkpoints"] if one["keep"]} == {
        ("web", 2),
        ("web", 3),
        ("far", 1),
    }
    assert ["newest of a session that lives on elsewhere"] in [
        one["rules"] for one in plan["checkpoints"]
    ]
    site(*label)
    assert (site.numbers("web"), site.numbers("far"), site.numbers("dead")) == ([2, 3], [1], [])
    site(*label, "--newest-too")
    assert site.repository().list() == []
    assert site.write("web").number == 4


def test_the_newest_of_a_session_that_its_dump_has_ended_elsewhere_stays(site: Site) -> None:
    """No host holds the session, but its newest checkpoint stays until `kill` on the host that had
    it says that it is not needed.
    """
    repository = site.repository()

    def lies(session: str, id: str = "ab" * 16) -> CheckpointSummary:
        with repository.writer(Reporter()) as writer:
            made = kit.fill(writer, kit.Content(b"memory" * 4096, {"a": b"a"}), session=session)
            return writer.commit(
                made.with_use(session=SessionRef(session, id), criu={"leave_running": False})
            )

    for session in ("bare", "given", "kept", "killed", "taken") * 2:
        lies(session)
    ref, far = (
        {name: SessionRef(name, "ab" * 16) for name in ("given", "killed", "taken", "none")},
        "f" * 32,
    )
    for name in ("given", "killed", "taken"):
        leases.claim(repository, name, ref[name].id, 1, host=far).keep()
        assert leases.release(repository, name, host=far)
    assert leases.end(repository, ref["killed"], 1, host=far) and not leases.end(
        repository, ref["killed"], 1, host=far
    )
    assert not leases.end(repository, ref["taken"], 1, host="e" * 32) and not leases.end(
        repository, ref["none"], 1, host=far
    )
    done = site("prune", "bare", "given", "killed", "taken", "--keep-label", "none=such")
    left = {name: site.numbers(name) for name in ("bare", "given", "killed", "taken")}
    assert left == {"bare": [2], "given": [2], "killed": [], "taken": [2]}
    assert ["newest of a session that was ended by it, on canary-host"] in [
        one["rules"] for one in done["checkpoints"]
    ]
    registry = Registry(site.config)
    for name in ("bare", "kept"):
        registry.put(
            SessionRecord(
                name, "ab" * 16, state="checkpointed", checkpoint="1", store=site.config.store
            )
        )
        assert (
            kill.kill(site.config.with_options(run_dir=str(site.path / "run")), name, 0)[
                "leases_kept"
            ]
            == []
        )
    site("prune", "--keep-label", "none=such")
    assert [site.numbers(name) for name in ("bare", "given", "kept")] == [[], [2], []]
    # What was said of a session says nothing of a later one of its name.
    lies("bare", "cd" * 16)
    assert site("prune", "--keep-label", "none=such")["removed"] == 0 and site.numbers("bare") == [
        3
    ]
    assert leases.end(repository, SessionRef("bare", "cd" * 16), 1, host=far)
    assert site("prune", "bare", "--keep-label", "none=such")["removed"] == 1
    assert leases.claim(repository, "bare", "ab" * 16, 2, host=far).head.epoch == 1


def test_a_lease_that_cannot_be_read_keeps_its_session_alone_from_being_pruned_away(
    site: Site,
) -> None:
    site.write("far")
    site.write("far")
    site.write("web")
    repository = site.repository()
    leases.claim(repository, "far", "ab" * 16, 1, host="f" * 32, host_name="elsewhere").keep()
    (lease,) = (path for path in (site.path / "store" / "sessions").rglob("*") if path.is_file())
    data = bytearray(lease.read_bytes())
    data[-1] ^= 1
    lease.write_bytes(data)
    done = site("prune", "--keep-label", "none=such")
    assert (done["removed"], site.numbers("far"), site.numbers("web")) == (2, [2], [])
    assert ["newest of a session that another host may hold"] in [
        one["rules"] for one in done["checkpoints"]
    ]


def test_policies_of_the_configuration_count_where_no_rule_is_given(
    site: Site, tmp_path: Path
) -> None:
    for session in ("web", "db", "other"):
        for _ in range(3):
            site.write(session)
    file = tmp_path / "config.yaml"
    file.write_text("retention:\n  web: {keep_last: 1}\n  'd*': {keep_within: 7d}\n")
    done = site("prune", "--config", str(file))
    assert done["without_policy"] == ["other"]
    assert [site.numbers(name) for name in ("web", "db", "other")] == [[3], [1, 2, 3], [1, 2, 3]]
    assert site("prune", CRIUCTL_RETENTION="{other: {keep_last: 2}}")["removed"] == 1
    for wrong in ("retention: [1]", "retention: {web: {keep_lots: 3}}", "retention: {web: 3}"):
        file.write_text(wrong)
        assert site("prune", "--config", str(file), code=2)["error"]["code"] == "config"


def test_store_info_tells_what_is_saved_and_who_grows(site: Site) -> None:
    for number in range(3):
        site.write("web", number // 2)  # the second is the first one again
    info = site("store", "info")
    assert info["bytes"]["whole"] == 900_000 and info["bytes"]["unique"] >= 600_000
    assert info["ratios"]["compression"] > 100 and info["ratios"]["deduplication"] == round(
        900_000 / info["bytes"]["unique"], 2
    )
    assert [(one["session"], one["checkpoints"]) for one in info["growth"]] == [("web", 3)]
    assert info["kept"] is None
    human = site.run(
        "store",
        "info",
        env={
            "CRIUCTL_STORE": site.config.store,
            "CRIUCTL_CACHE_DIR": site.config.cache_dir,
            "CRIUCTL_STATE_DIR": site.config.state_dir,
        },
    ).stdout
    assert "deduplication 1." in human and "  web" in human


def test_gc_frees_what_was_removed(site: Site) -> None:
    site.write("web", 1)
    site.write("db", 2)
    site("rm", "web")
    size = site("store", "info")["bytes"]["packs"]
    assert site("gc")["marked"] == 0  # younger than the grace time
    assert site("gc", "--dry-run", "--grace", "0")["deleted"] == 0
    done = site("gc", "--grace", "0")
    assert done["deleted"] and done["freed_bytes"] and not done["warnings"]
    assert site("store", "info")["bytes"]["packs"] < size
    assert site("verify", "db")["ok"] is True
    assert site("gc", "--grace", "soon", code=2)["error"]["code"] == "usage"
    manifest = next(
        path for path in (site.path / "store" / "checkpoints").rglob("*") if path.is_file()
    )
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert site("gc", "--grace", "0", code=8)["error"]["code"] == "damaged"


@pytest.mark.parametrize("cut", [True, False])
def test_what_is_pinned_and_damaged_can_be_removed(site: Site, cut: bool) -> None:
    """Else it would keep `gc` from freeing anything for ever."""
    site.write("web")
    site("pin", "web@1")
    (manifest,) = (
        path for path in (site.path / "store" / "checkpoints").rglob("*") if path.is_file()
    )
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-1] if cut else data[:-1] + bytes([data[-1] ^ 1]))
    site("rm", "web@1", code=9)
    assert site("unpin", "web@1")[0]["pinned"] is False
    site("rm", "web@1")
    assert site("gc", "--grace", "0")["checkpoints"] == 0


def test_no_pin_is_taken_away_where_one_of_them_cannot_be(site: Site) -> None:
    site.write("web")
    with site.repository().writer(Reporter()) as writer:
        kept = writer.commit(replace(kit.fill(writer, kit.SMALL, session="kept"), pinned=True))
    site("pin", "web")
    assert "pinned for good" in site("unpin", "web", kept.id, code=9)["error"]["message"]
    assert {one["session"]: one["pinned"] for one in site("list")} == {"web": True, "kept": True}

"""Around a restore."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support import checkpoints as kit

from criuctl.checkpoint.repository import Repository
from criuctl.errors import Conflict, Damaged, ObjectMissing
from criuctl.host.registry import Registry, SessionRecord
from criuctl.restore.outcome import check_not_moved, offering_another
from criuctl.store.base import Capabilities


def test_another_checkpoint_is_offered_for_what_is_damaged_or_missing(tmp_path: Path) -> None:
    repository = kit.repository(tmp_path)
    for _ in range(3):
        kit.write(repository)
    second = repository.manifest("web@2")
    with (
        pytest.raises(Damaged, match="flipped") as damaged,
        offering_another(repository, "web@2", second),
    ):
        raise Damaged("flipped", hint="Look.")
    assert damaged.value.hint.endswith("then `criuctl restore web@1`. Look.")
    # its manifest is not to be read
    with pytest.raises(ObjectMissing) as missing, offering_another(repository, "web"):
        raise ObjectMissing("gone")
    assert "criuctl restore web@3" in missing.value.hint
    for ref, manifest in (("web@1", repository.manifest("web@1")), (second.id[:8], None)):
        with pytest.raises(Damaged) as alone, offering_another(repository, ref, manifest):
            raise Damaged("flipped", hint="Look.")
        assert alone.value.hint == "Look."
    with pytest.raises(Conflict) as other, offering_another(repository, "web@2", second):
        raise Conflict("taken", hint="Wait.")
    assert other.value.hint == "Wait."


@pytest.mark.parametrize("leases", [False, True])
def test_what_has_left_is_not_brought_back_from_before_where_no_lease_tells(
    leases: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = kit.repository(tmp_path)
    kit.write(repository)
    manifest = replace(repository.manifest("web"), incarnation=3)
    capabilities = replace(repository.capabilities, conditional_create=leases)
    monkeypatch.setattr(Repository, "capabilities", property(lambda _self: capabilities))
    assert isinstance(capabilities, Capabilities)
    registry = Registry(kit.config(tmp_path, state_dir=str(tmp_path / "state")))
    check_not_moved(registry, repository, manifest, take_over=False)  # nothing is known of it
    moved = SessionRecord(
        "web",
        manifest.session.id,
        incarnation=4,
        state="checkpointed",
        moved_to="ssh://there/web",
        home="there",
    )
    registry.put(moved)
    if leases:
        check_not_moved(registry, repository, manifest, take_over=False)
        return
    with pytest.raises(Conflict, match="has left for there") as refused:
        check_not_moved(registry, repository, manifest, take_over=False)
    # unknown on this host
    assert "--take-over once it has ended there" in refused.value.hint
    check_not_moved(registry, repository, manifest, take_over=True)
    # dumped there since
    check_not_moved(registry, repository, replace(manifest, incarnation=4), take_over=False)
    registry.put(replace(moved, moved_to=""))
    check_not_moved(registry, repository, manifest, take_over=False)

"""Around a restore."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.errors import Conflict, Damaged, ObjectMissing
from criuctl.ops.restores.arrival import offering_another


def test_another_checkpoint_is_offered_for_what_is_damaged_or_missing(tmp_path: Path) -> None:
    repository = kit.repository(tmp_path)
    for _ in range(3):
        kit.write(repository)
    second = repository.manifest("web@2")
    with pytest.raises(Damaged, match="flipped") as damaged, offering_another(repository, "web@2", second):
        raise Damaged("flipped", hint="Look.")
    assert damaged.value.hint.endswith("then `criuctl restore web@1`. Look.")
    with pytest.raises(ObjectMissing) as missing, offering_another(repository, "web"):  # its manifest is not to be read
        raise ObjectMissing("gone")
    assert "criuctl restore web@3" in missing.value.hint
    for ref, manifest in (("web@1", repository.manifest("web@1")), (second.id[:8], None)):
        with pytest.raises(Damaged) as alone, offering_another(repository, ref, manifest):
            raise Damaged("flipped", hint="Look.")
        assert alone.value.hint == "Look."
    with pytest.raises(Conflict) as other, offering_another(repository, "web@2", second):
        raise Conflict("taken", hint="Wait.")
    assert other.value.hint == "Wait."

"""What a dump makes ready before the tree stands still."""

from __future__ import annotations

from criuctl.criu import schema
from criuctl.ops import dump


def test_what_is_needed_in_frozen_time_is_loaded_before() -> None:
    schema._module.cache_clear()
    dump._load_libraries()  # nobody hears of what goes wrong there
    assert schema._module.cache_info().currsize

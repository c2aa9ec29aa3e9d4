"""What is loaded while a dump or a restore waits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from criuctl.host import preload

LOADED = """
import sys
from criuctl.startup import _Later, lazily
lazily()
from criuctl.criu import schema
from criuctl.host.preload import {name}, preload
preload({name})
print([name for name in {name} if not name.startswith("pb:") and type(sys.modules[name]) is _Later])
print(schema._module.cache_info().currsize > 0)
"""


@pytest.mark.parametrize("name", ["DUMP", "RESTORE"])
def test_all_of_it_is_loaded(name: str) -> None:
    """An error there is not visible anywhere else."""
    code = LOADED.format(name=name)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\nTrue\n", "")


def test_it_ends_when_there_is_something_to_do() -> None:
    left = [False, True]
    before = set(sys.modules)
    preload.preload(("this_is_loaded", "criuctl.ops"), enough=lambda: True)
    preload.preload(("criuctl.ops", "that_is_not"), enough=lambda: left.pop(0))
    assert set(sys.modules) == before

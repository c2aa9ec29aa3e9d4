"""A user leads a restore to files of others: nothing but the file of the dump, or what the user may
open, is ever given back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.laboratory import Laboratory

pytestmark = pytest.mark.integration


def refused(lab: Laboratory, told: Any, component: Path, code: int = 4) -> None:
    """The restore is refused, names the component at fault, and leaves nothing."""
    planned = lab.restore(told["checkpoint"], "--dry-run", check=False)
    answer = lab.restore(told["checkpoint"], check=False)
    assert answer["exit_code"] == code, answer
    assert str(component) in answer["error"]["message"] + answer["error"]["hint"], answer
    assert planned["ok"] is (code != 4), planned
    assert lab.processes() == []


@pytest.fixture
def secret(lab: Laboratory) -> Path:
    """A folder of root's with a file that the user may not read."""
    folder = lab.folder.parent / "roots"
    folder.mkdir(mode=0o755)
    (folder / "shadow").write_text("the hashes")
    (folder / "shadow").chmod(0o600)
    return folder


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_RDWR])
def test_a_folder_becomes_a_link(lab: Laboratory, secret: Path, flags: int) -> None:
    """The file of root's, of the same name, size and mode, is not opened."""
    lab.as_user("mkdir d; printf 'the hashes' > d/shadow; chmod 600 d/shadow")
    pid = lab.start((lab.folder / "d/shadow", flags))
    told = lab.dump(pid)
    lab.as_user(f"mv d d.old; ln -s {secret} d")
    refused(lab, told, lab.folder / "d")
    assert (secret / "shadow").read_text() == "the hashes"


def test_the_file_of_the_dump_comes_back_over_a_link(lab: Laboratory) -> None:
    """The user moved the folder and left a link: it is still that file."""
    lab.as_user("mkdir d; echo mine > d/file")
    told = lab.dump(lab.start((lab.folder / "d/file", os.O_RDWR)))
    lab.as_user("mv d e; ln -s e d")
    pid = lab.restore(told["checkpoint"])["pid"]
    assert lab.ask(pid, "os.read(opened[0], 9)") == "(b'mine\\n')".strip("()")

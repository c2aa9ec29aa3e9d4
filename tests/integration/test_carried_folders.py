"""`dump --carry-binaries` of a program in a folder in which the tree also writes."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from support.command import Criuctl, Home
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def test_a_log_in_the_folder_of_the_program(zoo: Zoo, criuctl: Criuctl, home: Home) -> None:
    """No host without the program could show it there: refused, and the remedy works."""
    folder = home.path / "job"
    folder.mkdir()
    program = folder / "program"
    shutil.copy(os.path.realpath(sys.executable), program)
    text = f"import time; log = open({str(folder / 'log')!r}, 'a'); print('ready', flush=True)"
    animal = zoo.launch([str(program), "-I", "-S", "-c", f"{text}; time.sleep(600)"])
    refused = criuctl("dump", animal.pid, "--carry-binaries", check=False)
    assert refused["exit_code"] == 4, refused
    assert f"{program} could not be shown" in refused["error"]["message"]
    assert refused["error"]["hint"] == f"Take it along with --with-files {program}."
    assert os.path.exists(f"/proc/{animal.pid}")
    report = criuctl("dump", animal.pid, "--carry-binaries", "--with-files", program)
    program.unlink()
    zoo.adopt(criuctl("restore", report["checkpoint"])["pid"], animal).end()

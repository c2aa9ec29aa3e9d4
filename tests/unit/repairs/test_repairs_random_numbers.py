"""What a restore does to random generators, on processes that stand still in a system call."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from criuctl.proc.elf_symbols import ElfSymbols
from criuctl.proc.mappings import mappings
from criuctl.proc.syscalls import read_process
from criuctl.repairs import openssl_generators

_PROGRAM = """
import os, ssl
ssl.RAND_bytes(1)
while True:
    print(os.getpid(), len(ssl.RAND_bytes(8)), flush=True)
    input()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """One that has used OpenSSL, and waits for a line."""
    argv = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(
        argv, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        answer(child)
        yield child
        child.kill()


def answer(process: subprocess.Popen[str]) -> None:
    """It knows its own PID, and has random numbers."""
    assert process.stdout is not None
    assert process.stdout.readline().split() == [str(process.pid), "8"]


def library(pid: int) -> openssl_generators._File:
    """libcrypto in a process."""
    areas = [one for one in mappings(pid) if Path(one.path).name.startswith("libcrypto")]
    code = [(one.start, one.end) for one in areas if "x" in one.perms]
    return openssl_generators._File(areas[0].path, areas[0].start, code)


@pytest.mark.parametrize("room", [True, False])
def test_the_number_of_openssl(
    process: subprocess.Popen[str], room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another one each time, at the same place; without room in the library on a new page."""
    if not room:
        monkeypatch.setattr(ElfSymbols, "unused_code", lambda self, length: None)
    assert process.stdin is not None
    pid, file = process.pid, library(process.pid)
    slot = ElfSymbols(partial(read_process, pid), file.start).slot(b"getpid")
    assert slot is not None
    before = read_process(pid, slot, 8)
    places, codes = set(), set()
    for _ in range(3):
        openssl_generators._change(pid, file)
        places.add(place := int.from_bytes(read_process(pid, slot, 8), "little"))
        codes.add(read_process(pid, place, 15))
        print(file=process.stdin, flush=True)
        answer(process)
    assert len(places) == 1 and place != int.from_bytes(before, "little") and len(codes) == 3
    assert file.executes(place) is room


def test_a_library_that_is_only_read(process: subprocess.Popen[str]) -> None:
    """What looks like the library, but is not executed, stays as it is."""
    file = library(process.pid)
    slot = ElfSymbols(partial(read_process, process.pid), file.start).slot(b"getpid")
    assert slot is not None
    before = read_process(process.pid, slot, 8)
    openssl_generators._change(process.pid, file._replace(code=[]))
    assert read_process(process.pid, slot, 8) == before


@pytest.mark.parametrize(
    ("code", "at"),
    [
        ("e92bec8dfe662e0f1f84000000000090", 0),
        ("f30f1efae92bec8dfe0f1f8000000000", 4),
        ("6a27580f053501020304c30f1f840000", 0),
        ("f30f1efa6a27580f053501020304c300", 4),
        ("4883ec08e82bec8dfe4883c408c39090", None),  # it goes on after the call
        ("e92bec8dfe534889fb662e0f1f840000", None),  # another function follows
    ],
)
def test_the_jump(code: str, at: int | None) -> None:
    if at is not None:
        assert openssl_generators._jump(bytes.fromhex(code)) == at
    else:
        with pytest.raises(ValueError, match="does more"):
            openssl_generators._jump(bytes.fromhex(code))


def test_damaged_symbols() -> None:
    """Whatever a process has in its memory, the answer is one, none, or a `ValueError`."""
    with (
        open(library(os.getpid()).path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content,
    ):
        head = content[:4096]

        def read(address: int, length: int) -> bytes:
            return (damaged + content[4096 : address + length])[address : address + length]

        for at in range(0, 900, 3):
            damaged = head[:at] + os.urandom(4) + head[at + 4 :]
            try:
                symbols = ElfSymbols(read, 0)
                symbols.function(b"openssl_get_fork_id")
                symbols.slot(b"getpid")
                symbols.unused_code(16)
            except ValueError:
                pass

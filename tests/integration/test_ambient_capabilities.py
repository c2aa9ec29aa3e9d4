"""Ambient capabilities that CRIU could not restore."""

from __future__ import annotations

import sys

import pytest
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

PROGRAM = """
import ctypes, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def must(result):
    assert result == 0, ctypes.get_errno()

header = struct.pack("Ii", 0x20080522, 0)
sets = (ctypes.c_uint32 * 6)()
must(libc.syscall(125, header, sets))  # capget
sets[2] |= 1 << 13  # CAP_NET_RAW may be inherited
must(libc.syscall(126, header, sets))  # capset
must(libc.prctl(47, 2, 13, 0, 0))  # PR_CAP_AMBIENT, RAISE
must(libc.prctl(28, int(sys.argv[1]), 0, 0, 0))  # PR_SET_SECUREBITS
while True:
    print(open("/proc/self/status").read().partition("CapAmb:")[2].split()[0], flush=True)
    time.sleep(0.05)
"""
NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE = 1 << 2, 1 << 6


def launched(zoo: Zoo, bits: int) -> Animal:
    return zoo.launch([sys.executable, "-c", PROGRAM, str(bits)], quiet=False)


def test_they_come_back_with_other_secure_bits(zoo: Zoo, trip: Trip) -> None:
    animal = launched(zoo, NO_SETUID_FIXUP)
    wait_until(animal.output, 60, "it runs")
    report = trip.dump(animal)
    restored = trip.restore(report, animal, equal=False)
    before = len(restored.output().split())
    wait_until(lambda: len(restored.output().split()) > before, 60, "it goes on")
    assert set(restored.output().split()) == {f"{1 << 13:016x}"}


def test_a_thread_that_may_raise_none_is_refused(zoo: Zoo, criuctl: Criuctl) -> None:
    """Better than a checkpoint that nothing brings back."""
    animal = launched(zoo, NO_CAP_AMBIENT_RAISE)
    wait_until(animal.output, 60, "it runs")
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 5, answer
    assert "SECBIT_NO_CAP_AMBIENT_RAISE" in answer["error"]["message"]
    before = len(animal.output().split())
    wait_until(lambda: len(animal.output().split()) > before, 60, "it runs on")
    assert criuctl("list") == []

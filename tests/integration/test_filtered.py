"""criuctl under a seccomp filter, as in most containers."""

from __future__ import annotations

import os
import sys

import pytest
from support.command import Criuctl
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

# Sets a filter that allows every call, and starts the program.
FILTERED = """
import os, sys
from criuctl.proc.sessionchild import refuse
refuse(())
os.execvp(sys.argv[1], sys.argv[1:])
"""


def filtered(criuctl: Criuctl) -> None:
    criuctl.prefix = [sys.executable, "-c", FILTERED]


def test_processes_with_a_filter_are_refused_before_the_freeze(zoo: Zoo, criuctl: Criuctl) -> None:
    """CRIU suspends filters of processes, which the kernel allows only a tracer without one."""
    animal = zoo.launch("counter.py", "1", prefix=[sys.executable, "-c", FILTERED])
    filtered(criuctl)
    report = criuctl("check", animal.pid, check=False)
    (error,) = (one for one in report["findings"] if one["level"] == "error")
    assert error["code"] == "seccomp"
    assert "seccomp=unconfined" in error["hint"]
    refused = criuctl("dump", animal.pid, check=False)
    assert refused["exit_code"] == report["exit_code"] != 0
    animal.ask()
    codes = {one["code"] for one in criuctl("doctor", check=False)["findings"]}
    assert "seccomp" in codes
    criuctl.prefix = []
    assert "seccomp" not in {one["code"] for one in criuctl("check", animal.pid)["findings"]}


def test_processes_without_a_filter_are_dumped(zoo: Zoo, criuctl: Criuctl, trip: Trip) -> None:
    animal = zoo.launch("counter.py", "1")
    filtered(criuctl)
    assert criuctl("dump", animal.pid)["checkpoint"]
    assert not os.path.exists(f"/proc/{animal.pid}")

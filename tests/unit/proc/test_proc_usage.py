"""CPU and memory of trees."""

from __future__ import annotations

import os
import subprocess
import sys

from support.keeper import wait_until

from criuctl.proc import usage


def test_a_tree_is_counted_with_its_children() -> None:
    program = "import os, time\nos.fork()\nend = time.time() + 1000\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            wait_until(
                lambda: (
                    usage.of_trees([process.pid])[process.pid].processes == 2
                    and usage.of_trees([process.pid])[process.pid].cpu > 0
                ),
                60,
                "two processes work",
            )
            found = usage.of_trees([process.pid, os.getpid()])
            assert 1 << 20 < found[process.pid].memory < found[os.getpid()].memory
            assert found[os.getpid()].processes >= 1
        finally:
            os.killpg(process.pid, 9)


def test_what_does_not_exist_is_left_out() -> None:
    assert usage.of_trees([1 << 30]) == {} and usage.of_trees([]) == {}

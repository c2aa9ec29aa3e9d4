"""What a session costs: nothing while it idles, little memory whatever it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.holding import TIMEOUT, Holders, numbers
from support.keeper import wait_until

pytestmark = pytest.mark.integration

_FOREVER = 0xFFFFFFFF  # a time-out of -1


def sleeps_for_good(pid: int) -> bool:
    """Whether the process waits in the kernel for descriptors, without a deadline."""
    # number, six arguments, ...; or "running"
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return len(words) > 4 and int(words[4], 16) & _FOREVER == _FOREVER


def test_an_idle_holder_has_no_deadline_and_is_small(holders: Holders) -> None:
    """Also after clients, output and a lease: 200 of them would otherwise wake up a core all
    day.
    """
    started = holders.start(*numbers(1_000_000))
    with holders.connect() as client:
        client.attach("start", write=True)
        client.wait_output(8_000_000 - 1, 120)
        client.heartbeat()
    wait_until(
        lambda: sleeps_for_good(started.holder_pid), TIMEOUT, "the holder sleeps without a deadline"
    )
    status = Path(f"/proc/{started.holder_pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    assert peak < 40, f"the holder had {peak:.1f} MiB"

"""What is known of a session without a holder."""

from __future__ import annotations

import os
import time
from datetime import datetime

from criuctl.host.registry import SessionRecord, boot_id
from criuctl.ops.sessions import known_of
from criuctl.proc.tree import ProcessIdentity


def test_a_tree_runs_since_its_root_was_started_and_not_since_its_last_checkpoint() -> None:
    own = ProcessIdentity.of(os.getpid())
    record = SessionRecord(
        "work", pid=own.pid, start_time=own.start_time, boot_id=boot_id(), updated=time.time() + 900
    )
    body = known_of(None, record)
    assert body["state"] == "running"
    began = datetime.fromisoformat(body["since"]).timestamp()
    assert began < time.time() < record.updated
    with open("/proc/uptime") as file:
        up = float(file.read().split()[0])
    assert abs(time.time() - up + own.start_time / os.sysconf("SC_CLK_TCK") - began) < 2

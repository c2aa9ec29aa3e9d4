"""The service manager is notified if it wants to be, and pinged while all is well."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from criuctl.proc.notify import ServiceManager


@pytest.mark.parametrize("abstract", [False, True])
def test_messages_and_pings(tmp_path: Path, abstract: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"\0criuctl-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
        manager.bind(name)
        manager.settimeout(60)
        service = ServiceManager(
            {"NOTIFY_SOCKET": name.replace("\0", "@"), "WATCHDOG_USEC": "30000"}
        )
        service.tell("READY=1", "STATUS=all\nis well")
        assert manager.recv(100) == b"READY=1\nSTATUS=all is well"
        well = [False, True]
        service.watchdog(lambda: well.pop(0) if len(well) > 1 else well[0])
        assert manager.recv(100) == manager.recv(100) == b"WATCHDOG=1"
        service.close()


def test_without_a_notify_socket(tmp_path: Path) -> None:
    other = ServiceManager(
        {"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
    )
    for service in (ServiceManager({}), other):
        service.tell("READY=1")
        service.watchdog(lambda: True)
        service.close()

"""Control groups by their paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from criuctl.cgroups.membership import mount_points, put_back, service_of


@pytest.mark.parametrize(
    ("groups", "service"),
    [
        ({"": "/system.slice/web.service"}, "web.service"),
        ({"": "/system.slice/system-web.slice/web@1.service/worker"}, "web@1.service"),
        ({"name=systemd": "/system.slice/web.service", "memory": "/"}, "web.service"),
        ({"": "/criuctl-trees.slice/web.service"}, "web.service"),  # it has been restored before
        ({"": "/user.slice/user-0.slice/session-2.scope"}, ""),
        ({"": "/user.slice/user-1000.slice/user@1000.service/app.slice/mine.service"}, ""),
        ({"": "/docker/web.service"}, ""),
        ({"": "/"}, ""),
        ({}, ""),
    ],
)
def test_services(groups: dict[str, str], service: str) -> None:
    assert service_of(groups) == service


def test_nothing_is_written_outside_the_groups(tmp_path: Path) -> None:
    """Whatever a manifest says."""
    hierarchy, point = next(iter(mount_points().items()))
    path = f"/{os.path.relpath(tmp_path, point)}"
    assert put_back({os.getpid(): {hierarchy: path}}) == [f"{hierarchy or 'unified'}:{path}"]
    assert os.listdir(tmp_path) == []

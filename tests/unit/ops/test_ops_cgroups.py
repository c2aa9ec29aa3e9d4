"""Control groups by their paths."""

from __future__ import annotations

import pytest

from criuctl.ops.resources.cgroups import service_of


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

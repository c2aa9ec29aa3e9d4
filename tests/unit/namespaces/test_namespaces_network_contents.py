"""What is known of a net namespace, and what a restore takes of it from a manifest that may be
hostile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from criuctl.namespaces import network_contents
from criuctl.proc.namespaces import in_net_namespace, new_net_namespace
from criuctl.report import Reporter


@pytest.fixture
def namespace() -> int:
    return new_net_namespace()


def test_a_new_one_has_nothing_beyond_a_new_one(namespace: int) -> None:
    assert network_contents.beyond_new(namespace).words() == []
    os.close(namespace)


def test_what_it_has_survives_a_manifest(namespace: int) -> None:
    in_net_namespace(namespace, lambda: Path("/proc/sys/net/core/somaxconn").write_text("777"))
    found = network_contents.beyond_new(namespace)
    os.close(namespace)
    assert found.words() == ["setting net.core.somaxconn=777"]
    assert network_contents.Network.from_dict(found.to_dict()).words() == found.words()


@pytest.mark.parametrize(
    "recorded",
    [
        {"networks": 7},
        {"networks": [7, {}, {"pid": []}, {"pid": 2}]},
    ],
)
def test_what_is_not_of_its_form_is_left_out(recorded: dict[str, object]) -> None:
    assert _warned(recorded) == []


def test_parts_that_are_not_of_their_form_are_left_out() -> None:
    recorded = {"routes": ["x"], "rules": 7, "links": [[]], "settings": [1]}
    assert network_contents.Network.from_dict(recorded).words() == []


def test_the_network_of_the_host_is_not_changed() -> None:
    """By a manifest that calls the tree's own what is the host's, in its images."""
    setting = Path("/proc/sys/net/core/somaxconn")
    before = setting.read_text()
    recorded = {"networks": [{"pid": 1, "settings": {"core/somaxconn": str(int(before) + 1)}}]}
    try:
        (warning,) = _warned(recorded)
        assert "no net namespace of its own" in warning
        assert setting.read_text() == before
    finally:
        setting.write_text(before)


def _warned(recorded: Mapping[str, object]) -> list[str]:
    """What is said where PID 1 of the checkpoint is in our own net namespace."""
    warnings: list[str] = []
    reporter = Reporter()
    reporter.warning = lambda text, hint="": warnings.append(text)  # type: ignore[method-assign]
    network_contents.complete(recorded, {1: os.getpid()}, reporter)
    return warnings


def test_a_setting_is_no_path(namespace: int, tmp_path: Path) -> None:
    """Only what the namespace has is set."""
    target = tmp_path / "file"
    target.write_text("as it was")
    outside = os.path.relpath(target, "/proc/sys/net")
    network_contents._complete(
        namespace, network_contents.Network.from_dict({"settings": {outside: "changed"}})
    )
    os.close(namespace)
    assert target.read_text() == "as it was"

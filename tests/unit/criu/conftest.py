"""Fixtures for tests in which another program stands in for CRIU."""

from __future__ import annotations

import pytest

from criuctl.criu import features


@pytest.fixture
def no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a program cannot be asked for the kernel's features; that would take 20 seconds."""
    monkeypatch.setattr(features, "_lend", lambda _argv: None)

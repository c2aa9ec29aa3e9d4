"""A folder of hooks, the configuration that names it, and no hooks that ship."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hooking import HookFolder

from criuctl.config import Config
from criuctl.hooks import find


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HookFolder:
    """What ships, instead of what does."""
    folder = HookFolder(tmp_path / "shipped")
    monkeypatch.setattr(find, "shipped_folder", lambda: str(folder.path))
    return folder


@pytest.fixture
def hooks(tmp_path: Path, shipped: HookFolder) -> HookFolder:
    """The configured folder."""
    return HookFolder(tmp_path / "hooks")


@pytest.fixture
def config(hooks: HookFolder) -> Config:
    """The configuration with that folder."""
    return Config(hook_dirs=(str(hooks.path),))

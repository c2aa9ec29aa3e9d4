"""Which hooks there are, in which order, and which are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.hooking import HookFolder

from criuctl.config import Config
from criuctl.hooks.find import all_hooks, executables, shipped_folder
from criuctl.hooks.trust import objection

NOBODY = 65534


def names(config: Config, phase: str = "pre-dump") -> list[tuple[str, str]]:
    return [(hook.name, hook.path.split("/")[-3]) for hook in executables(config, phase)]


def test_order_is_by_file_name_over_all_folders(
    hooks: HookFolder, shipped: HookFolder, config: Config, tmp_path: Path
) -> None:
    more = HookFolder(tmp_path / "more")
    for folder, name in (
        (hooks, "30-c"),
        (shipped, "20-b"),
        (more, "10-a"),
        (more, "100-d"),
        (hooks, "9-e"),
    ):
        folder.sh("pre-dump", name, "true")
    config = replace(config, hook_dirs=(*config.hook_dirs, str(more.path)))
    assert names(config) == [
        ("10-a", "more"),
        ("100-d", "more"),
        ("20-b", "shipped"),
        ("30-c", "hooks"),
        ("9-e", "hooks"),
    ]
    assert names(config, "frozen") == []


def test_a_later_folder_replaces_and_masks(
    hooks: HookFolder, shipped: HookFolder, config: Config
) -> None:
    for name in ("kept", "replaced", "emptied", "disabled"):
        shipped.sh("pre-dump", name, "true")
    hooks.sh("pre-dump", "replaced", "true")
    hooks.file("pre-dump", "emptied", "")
    hooks.file("pre-dump", "disabled", "#!/bin/sh\n", mode=0o644)
    assert names(config) == [("kept", "shipped"), ("replaced", "hooks")]


def test_leftovers_folders_and_hidden_files_are_no_hooks(hooks: HookFolder, config: Config) -> None:
    for name in ("a~", "b.bak", "c.dpkg-old", ".d", "e.swp"):
        hooks.sh("pre-dump", name, "true")
    (hooks.path / "pre-dump" / "folder").mkdir()
    hooks.sh("pre-dump", "f.sh", "true")
    assert names(config) == [("f.sh", "hooks")]


def test_missing_folders_hold_no_hooks(tmp_path: Path, shipped: HookFolder) -> None:
    assert executables(Config(hook_dirs=(str(tmp_path / "nowhere"),)), "pre-dump") == []


def test_what_is_built_in_is_listed_first(hooks: HookFolder, config: Config) -> None:
    hooks.sh("frozen", "aaa", "true")
    assert [(h.name, h.origin) for h in all_hooks(config, "frozen")][-1] == ("aaa", "configured")
    listed = {(h.phase, h.name) for h in all_hooks(config) if h.origin == "built-in"}
    wanted = {("frozen", "connections"), ("frozen", "terminals")}
    assert listed == wanted | {
        ("reconnect", name) for name in ("postgresql", "redis", "journal", "tcp")
    }


def test_what_ships_is_found_in_the_checkout() -> None:
    assert (Path(shipped_folder()) / "README.md").is_file()


def _file_mode(path: Path) -> Path:
    path.chmod(0o775)
    return path


def _file_of_others(path: Path) -> Path:
    os.chown(path, NOBODY, NOBODY)
    return path


def _folder_mode(path: Path) -> Path:
    path.parent.chmod(0o777)
    return path.parent


def _folder_of_others(path: Path) -> Path:
    os.chown(path.parent, NOBODY, NOBODY)
    return path.parent


def _top_mode(path: Path) -> Path:
    path.parents[1].chmod(0o1777)  # sticky: others could still add hooks
    return path.parents[1]


def _link_to_file(path: Path) -> Path:
    target = path.parents[2] / "target"
    path.rename(target)
    path.symlink_to("../../target")
    target.chmod(0o757)
    return target


def _link_through_folder(path: Path) -> Path:
    open_folder = path.parents[2] / "open"
    open_folder.mkdir()
    path.rename(open_folder / "target")
    path.symlink_to(open_folder / "target")
    open_folder.chmod(0o777)
    return open_folder


def _link_over_link(path: Path) -> Path:
    """The last target is sound, but on the way a folder lets others turn the link."""
    open_folder = path.parents[2] / "open"
    open_folder.mkdir()
    (open_folder / "hop").symlink_to("/bin/true")
    path.unlink()
    path.symlink_to(open_folder / "hop")
    open_folder.chmod(0o777)
    return open_folder


SPOILERS = [
    _file_mode,
    _file_of_others,
    _folder_mode,
    _folder_of_others,
    _top_mode,
    _link_to_file,
    _link_through_folder,
    _link_over_link,
]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__.strip("_"))
def test_what_others_can_change_is_refused(
    spoil: Callable[[Path], Path], hooks: HookFolder, config: Config
) -> None:
    path = hooks.sh("pre-dump", "hook", "true")
    (sound,) = executables(config, "pre-dump")
    assert sound.refused == ""
    culprit = spoil(path)
    (spoilt,) = executables(config, "pre-dump")
    assert str(culprit) in spoilt.refused
    assert str(culprit) in spoilt.hint


def test_others_cannot_mask_a_hook_either(
    hooks: HookFolder, shipped: HookFolder, config: Config
) -> None:
    shipped.sh("pre-dump", "guard", "true")
    hooks.file("pre-dump", "guard", "", mode=0o666)
    (found,) = executables(config, "pre-dump")
    assert "can be written by others" in found.refused


def test_sound_links_and_folders_above_are_no_objection(
    hooks: HookFolder, config: Config, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)  # above the configured folder: the operator's own choice
    link = hooks.path / "pre-dump" / "true"
    link.parent.mkdir()
    link.symlink_to("/bin/true")
    assert objection(str(link), str(hooks.path)) is None
    dangling = hooks.path / "pre-dump" / "dangling"
    dangling.symlink_to("nowhere")
    assert [(h.name, bool(h.refused)) for h in executables(config, "pre-dump")] == [
        ("dangling", True),
        ("true", False),
    ]


def test_a_configured_folder_that_is_a_link(hooks: HookFolder, tmp_path: Path) -> None:
    hooks.sh("pre-dump", "hook", "true")
    link = tmp_path / "link"
    link.symlink_to(hooks.path)
    assert [h.refused for h in executables(Config(hook_dirs=(str(link),)), "pre-dump")] == [""]
    hooks.path.chmod(0o777)
    assert "can be written" in executables(Config(hook_dirs=(str(link),)), "pre-dump")[0].refused

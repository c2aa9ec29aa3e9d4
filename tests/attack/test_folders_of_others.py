"""Folders and files that another user has made or can change, where root's criuctl looks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl, Home

from criuctl.config import Config, load
from criuctl.criu import binary
from criuctl.errors import ConfigError, PlatformError, UntrustedPath
from criuctl.host import inside_report, registry
from criuctl.host.registry import Registry
from criuctl.proc import locks, ownership
from criuctl.proc.folders import make_private
from criuctl.session import sessions

USER = 1001


@pytest.fixture
def sticky(home: Home) -> Path:
    """A folder in which everybody may make things, as /dev/shm is."""
    folder = home.path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def by_user(path: Path) -> Path:
    """A folder that the user has made."""
    path.mkdir()
    os.chown(path, USER, USER)
    return path


def a_folder(path: Path, victim: Path) -> None:
    by_user(path)
    for name in ("locks", "shields", "groups", "inside", "holders"):
        (path / name).symlink_to(victim)
        os.chown(path / name, USER, USER, follow_symlinks=False)


def a_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)
    os.chown(path, USER, USER, follow_symlinks=False)


def a_link_of_root_s(path: Path, victim: Path) -> None:
    """One that root has made elsewhere, and the user has moved here."""
    path.symlink_to(victim)


def written_by_others(path: Path, victim: Path) -> None:
    path.mkdir()
    path.chmod(0o777)
    (path / "locks").symlink_to(victim)


MADE = [a_folder, a_link, a_link_of_root_s, written_by_others]


@pytest.fixture
def victim(home: Home) -> Path:
    """A folder of root's with files that no other user may remove."""
    folder = home.path / "victim"
    folder.mkdir()
    for name in ("locks", "shields", "groups", "inside", "holders"):
        (folder / name).mkdir()
        (folder / name / "kept").touch()
    (folder / "kept").touch()
    (folder / "kept.json").write_text("{}")
    return folder


def untouched(victim: Path) -> bool:
    return sum(1 for path in victim.rglob("kept*") if path.is_file()) == 7


# A host whose /run is read-only, and where the user was first in /dev/shm.
FALLBACK = """
mount --bind /run /run && mount -o remount,bind,ro /run
mount -t tmpfs -o mode=1777 none /dev/shm
made=$1 victim=$2 && shift 2
case $made in
a_folder) setpriv --reuid 1001 --clear-groups sh -c '
    mkdir /dev/shm/criuctl &&
    ln -s "$0/locks" "$0/shields" "$0/groups" /dev/shm/criuctl' "$victim" ;;
a_link) setpriv --reuid 1001 --clear-groups ln -s "$victim" /dev/shm/criuctl ;;
a_link_of_root_s) ln -s "$victim" /dev/shm/criuctl ;;
written_by_others) mkdir -m 777 /dev/shm/criuctl && ln -s "$victim/locks" /dev/shm/criuctl ;;
nothing) ;;
esac
exec "$@"
"""


def fallen_back(criuctl: Criuctl, made: str, victim: Path) -> dict[str, Any]:
    """What a restore says on such a host."""
    criuctl.extra["CRIUCTL_RUN_DIR"] = ""
    criuctl.prefix = ["unshare", "--mount", "sh", "-euc", FALLBACK, "sh", made, str(victim)]
    report: dict[str, Any] = criuctl("restore", "x", check=False)
    return report


@pytest.mark.parametrize("made", [made.__name__ for made in MADE])
def test_the_fallback_of_the_run_folder(criuctl: Criuctl, victim: Path, made: str) -> None:
    """Without a writable /run the locks are in /dev/shm: never in a folder of another user's."""
    report = fallen_back(criuctl, made, victim)
    assert report["exit_code"] == 4, report
    assert "/dev/shm/criuctl" in report["error"]["message"] and report["error"]["hint"]
    assert untouched(victim)


def test_the_fallback_works(criuctl: Criuctl, victim: Path) -> None:
    """Where the folder did not exist before, the command goes on: there is no such store."""
    report = fallen_back(criuctl, "nothing", victim)
    assert report["exit_code"] == 7, report


@pytest.mark.parametrize("made", MADE)
def test_a_run_folder_of_somebody_else(
    criuctl: Criuctl,
    sticky: Path,
    victim: Path,
    made: Callable[[Path, Path], None],
) -> None:
    """A configured one, by the command: exit 4, and nothing is removed."""
    made(sticky / "run", victim)
    criuctl.extra["CRIUCTL_RUN_DIR"] = str(sticky / "run")
    for command in (["restore", "x"], ["run", "--json", "--detach", "--", "true"]):
        answer = criuctl(*command, check=False)
        assert answer["exit_code"] == 4, (command, answer)
        assert str(sticky / "run") in answer["error"]["message"]
    assert untouched(victim)


def test_one_function_for_all(sticky: Path, victim: Path) -> None:
    """Every folder at a name that can be guessed: of locks, reports, sessions, state and keys."""
    a_folder(sticky / "run", victim)
    run = Config(run_dir=str(sticky / "run"))
    state = Config(state_dir=str(sticky / "run"))
    for uses in (
        lambda: registry.run_folder(run, "locks"),
        lambda: inside_report.sweep(run),
        lambda: sessions.all_states(run),
        lambda: sessions.state_of(run, "web"),
        lambda: sessions.forget(run, "web"),
        lambda: Registry(state),
        lambda: make_private(sticky / "run" / "new"),
        lambda: make_private(sticky / "run"),
    ):
        with pytest.raises(UntrustedPath, match="is not used"):
            uses()
    assert not (sticky / "run" / "new").exists()
    assert untouched(victim)


def test_a_folder_of_one_s_own_in_a_sticky_one(sticky: Path) -> None:
    make_private(sticky / "own" / "below")
    assert (sticky / "own").stat().st_mode & 0o777 == 0o755
    with locks.held(sticky / "own" / "below" / "lock"):
        pass
    ownership.check_own(sticky / "own")


# -- configuration ----------------------------------------------------------------------------


@pytest.fixture
def theirs(home: Home) -> Path:
    """The HOME of a user, with a configuration that has root run the user's program."""
    home.path.chmod(0o711)
    folder = by_user(home.path / "user")
    for name in (".config", ".config/criuctl"):
        by_user(folder / name)
    program = folder / "criu"
    program.write_text(f"#!/bin/sh\nid >{folder}/ran\n")
    program.chmod(0o755)
    config = folder / ".config" / "criuctl" / "config.yaml"
    config.write_text(f"criu: {program}\n")
    os.chown(config, USER, USER)
    return folder


def test_home_of_a_user_that_sudo_kept(criuctl: Criuctl, theirs: Path) -> None:
    """Root runs nothing that the user's configuration names."""
    home = {"HOME": str(theirs), "XDG_CONFIG_HOME": ""}
    answer = criuctl("doctor", check=False, env=home)
    assert answer["exit_code"] == 2, answer
    assert f"{theirs} belongs to user {USER}, not to root" in answer["error"]["message"]
    assert "sudo -H" in answer["error"]["hint"]
    assert not (theirs / "ran").exists()
    (theirs / ".config" / "criuctl" / "config.yaml").unlink()
    assert criuctl("version", check=False, env=home)["exit_code"] == 0


@pytest.mark.parametrize("by", ["--config", "XDG_CONFIG_HOME", "HOME", "a link"])
def test_each_way_to_a_configuration(home: Home, theirs: Path, by: str) -> None:
    file = theirs / ".config" / "criuctl" / "config.yaml"
    named, environ = None, {"HOME": str(home.path)}
    if by == "--config":
        named = str(file)
    elif by == "a link":
        (home.path / "config.yaml").symlink_to(file)
        named = str(home.path / "config.yaml")
    else:
        environ = {by: str(theirs / ".config" if by == "XDG_CONFIG_HOME" else theirs)}
    with pytest.raises(ConfigError, match=f"{theirs} belongs to user {USER}"):
        load(named, environ)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_configuration_that_others_can_write(home: Home, mode: int) -> None:
    file = home.path / "config.yaml"
    file.touch()
    file.chmod(mode)
    with pytest.raises(ConfigError, match="can be written by others") as caught:
        load(str(file), {})
    assert f"chmod go-w {file}" in caught.value.hint
    file.chmod(0o644)
    assert load(str(file), {}).sources == (str(file),)
    home.path.chmod(0o770)
    with pytest.raises(ConfigError, match=f"{home.path} can be written by others"):
        load(str(file), {})
    home.path.chmod(0o700)


def test_what_the_caller_names_or_opens_itself(home: Home, sticky: Path) -> None:
    """A file of one's own in a sticky folder, a pipe of the shell, /dev/null."""
    file = sticky / "config.yaml"
    file.write_text("host_id: here\n")
    assert load(str(file), {}).host_id == "here"
    reading, writing = os.pipe()
    os.write(writing, b"host_id: piped\n")
    os.close(writing)
    assert load(f"/dev/fd/{reading}", {}).host_id == "piped"
    os.close(reading)
    assert load("/dev/null", {}).host_id == ""


def test_an_installed_criu_of_somebody_else(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefix that is not where this criuctl is: its record and its programs are root's own."""
    prefix = home.path / "prefix"
    prefix.mkdir()
    program, record = prefix / "criu", prefix / "criu.json"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    record.write_text(f'{{"argv": ["{program}"], "version": "4.2"}}')
    monkeypatch.setattr(binary, "SETUP_PREFIXES", (home.path / "none", prefix))
    assert binary.find(Config()).argv == (str(program),)
    for one in (program, record, prefix):
        os.chown(one, USER, USER)
        with pytest.raises(PlatformError, match=f"{one} belongs to user {USER}") as caught:
            binary.find(Config())
        assert "chown" in caught.value.hint
        os.chown(one, 0, 0)

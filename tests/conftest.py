"""Fixtures that several folders of tests share: criuctl as a user runs it, the zoo, and the leak
guard.
"""

from __future__ import annotations

import gc
import os
import shutil
import stat
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support import leaks, linting
from support.aftermath import Aftermath
from support.command import Criuctl, Home
from support.confinement import Confinement
from support.keeper import Keeper
from support.trip import Trip
from support.zoo import PROGRAMS, Zoo

# A slow machine is no failure; and every run tries the same examples, unless one goes looking for
# others.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize="CRIUCTL_TEST_SEARCH" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

# The tests themselves stay: to look through them for garbage again and again would take minutes of
# a whole run.
gc.disable()  # until they are collected

pytest_plugins = [
    "servers.fixtures",
    "support.asking",
    "support.browsing",
    "support.homes",
    "support.hosts",
    "support.relaying",
    "support.slurm",
]  # radosgw_server and rclone_server are there once for the whole session


_CONFINEMENT = Confinement()  # before any test module reads the environment
_AHEAD = pytest.StashKey[linting.Check]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected stays for good.  In a long run, what `scripts/lint` has to say is found
    out meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)
    gc.enable()
    wanted = any(item.nodeid.endswith(f"test_lint[{linting.AHEAD}]") for item in session.items)
    if wanted and len(session.items) > 500 and not session.config.option.collectonly:
        session.config.stash[_AHEAD] = linting.Check(linting.AHEAD, patient=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing outlives the tests."""
    if (ahead := session.config.stash.get(_AHEAD, None)) is not None:
        ahead.end()


def pytest_unconfigure() -> None:
    """The folders of this run go last."""
    _CONFINEMENT.close()


@pytest.fixture
def checked_ahead(request: pytest.FixtureRequest) -> linting.Check | None:
    """The check that was begun when the tests were."""
    return request.config.stash.get(_AHEAD, None)


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    """The parent of all that the tests start."""
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    """Folders with a token of this test's own; afterwards nothing that bears the token may be left
    on the machine.
    """
    token = f"czoo{uuid.uuid4().hex[:10]}"
    before = leaks.look(token)
    home = Home(token, Path("/tmp") / token, Path("/dev/shm") / token)
    for path in (home.path, home.run):
        path.mkdir(mode=0o700)
    try:
        yield home
    finally:
        found = leaks.leftovers(before, token, allowed=frozenset({str(home.path), str(home.run)}))
        # As `rglob`, but a folder that is removed at this moment has nothing in it.
        large = [
            path
            for folder, _, names in os.walk(home.run)
            for name in names
            if _size(path := Path(folder, name)) > 4096
        ]
        # A tree's report to itself stays until the next command finds the tree gone, and grows with
        # its connections.
        found += [f"plain image {path}" for path in large if path.parent != home.run / "inside"]
        leaks.end_processes(token)
        for path in (home.path, home.run):
            shutil.rmtree(path)
    if found:
        pytest.fail("left behind: " + "; ".join(found))


def _size(path: Path) -> int:
    """Of a file; 0 when it is none, or was removed at this moment."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


@pytest.fixture
def zoo(keeper: Keeper, home: Home) -> Iterator[Zoo]:
    """Starts programs of the zoo; whatever the test knows of is ended before the leak guard
    looks.
    """
    zoo = Zoo(keeper, home.path, home.token)
    yield zoo
    zoo.close()


@pytest.fixture
def criuctl(keeper: Keeper, home: Home) -> Criuctl:
    """criuctl with a local store that does not exist yet: the first dump makes it."""
    return Criuctl(keeper, home)


@pytest.fixture
def trip(criuctl: Criuctl, zoo: Zoo) -> Trip:
    """Dumps and restores with the oracle around them."""
    return Trip(criuctl, zoo)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of the zoo that are written in C, compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    for source in PROGRAMS.glob("*.c"):
        subprocess.run(
            ["gcc", "-O1", "-Wall", "-Werror", "-pthread", "-o", folder / source.stem, source],
            check=True,
            timeout=60,
        )
    return folder


@pytest.fixture(scope="session")
def real_criu() -> str:
    """The CRIU that criuctl uses here, as a command for sh."""
    from criuctl.config import load
    from criuctl.criu import binary

    return " ".join(binary.find(load()).argv)


@pytest.fixture
def aftermath(criuctl: Criuctl, zoo: Zoo, trip: Trip) -> Aftermath:
    """The judge that is asked after every crash; the store exists."""
    criuctl("store", "init")
    return Aftermath(criuctl, zoo, trip)

"""Cache what CRIU has found out about this kernel, where CRIU itself does not.

CRIU tests the kernel's features whenever it starts, for some 30 ms in which it mounts file systems
in ``/tmp`` and starts iptables. It keeps the results for the rest of the boot in
``/run/criu.kdat``, but only if ``/run`` is a tmpfs (criu/kerndat.c, ``kerndat_save_cache``), which
it is not in most containers. There, one CRIU is once started with a tmpfs mounted for it at
``/run``, and the file that it wrote is kept in `FOLDER`, by boot, CRIU and capabilities.

``/run/criu.kdat`` then becomes a link to ``/proc/self/fd/N/criu.kdat``. It works only for a CRIU
that got this folder from us as its descriptor N, and leads nowhere for any other: a CRIU that
others start does not find the cache, nor does one after a reboot, nor one in another mount
namespace. Without it CRIU runs its tests, so nothing here fails.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from zlib import crc32

from ..errors import CriuctlError
from ..proc import command
from ..proc.mounts import read_mounts
from ..proc.ownership import check_own
from ..proc.procfs import read_lines

FOLDER = Path("/run/criuctl/features")
_CACHE = Path("/run/criu.kdat")
# The descriptor, or the next free one. No other code uses it, so the link need not change, and it
# is below the low limit of a session's holder, which starts CRIU for it.
_NUMBER = 200
_TIMEOUT = 20.0
_KEPT = 8  # CRIU programs, and sets of capabilities
_FIND_OUT = """
cache=$1 && shift
mount -t tmpfs -o mode=700 criuctl "${cache%/*}" || exit
"$@" --no-default-config check --feature uffd-noncoop >/dev/null 2>&1
exec cat "$cache"
"""


@contextmanager
def cache_descriptors(argv: Sequence[str]) -> Iterator[list[int]]:
    """Yield the descriptors to pass to the CRIU that `argv` starts: one, or none."""
    fd: int | None = None
    try:
        with suppress(OSError, CriuctlError):
            fd = _lend(argv)
        yield [] if fd is None else [fd]
    finally:
        if fd is not None:
            os.close(fd)


def known(argv: Sequence[str], root: str = "/") -> bool:
    """Return whether that CRIU needs no feature tests.

    `root`: a path of the root folder where it will run.
    """
    there = Path(f"{root}{_CACHE}")
    if _kept_by_criu(there):
        return True
    with suppress(OSError), cache_descriptors(argv) as fds:
        return os.readlink(there) in map(_cache_path, fds)
    return False


def _kept_by_criu(cache: Path) -> bool:
    return cache.is_file() and not cache.is_symlink()


def _cache_path(fd: int) -> str:
    """Return the path that leads a process with `fd` to the cache."""
    return f"/proc/self/fd/{fd}/{_CACHE.name}"


def _lend(argv: Sequence[str]) -> int | None:
    check_own(FOLDER)  # CRIU trusts what is kept there
    kept = FOLDER / _name(argv)
    if not kept.exists():
        run = os.stat(_CACHE.parent).st_dev
        if _kept_by_criu(_CACHE) or any(
            mount.kind == "tmpfs" and mount.device == run for mount in read_mounts()
        ):
            return None
        _keep(kept, argv)
    if not (kept / _CACHE.name).exists():
        return None
    folder = os.open(kept, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = fcntl.fcntl(folder, fcntl.F_DUPFD_CLOEXEC, _NUMBER)
    finally:
        os.close(folder)
    try:
        _link(_cache_path(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _name(argv: Sequence[str]) -> str:
    """Return the cache's name: by boot, and by all that changes CRIU's results within it."""
    seen = [line for line in read_lines(os.getpid(), "status") if line.startswith("CapEff")]
    for word in argv:
        with suppress(OSError):  # an option
            found = os.stat(word)
            seen.append(f"{word} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}")
    return f"{_boot()}-{crc32(repr(seen).encode()):08x}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _found_out(argv: Sequence[str]) -> bytes:
    """Return the file that a private CRIU writes; empty if it cannot be started so."""
    tried = command.run(
        ["unshare", "--mount", "--", "sh", "-c", _FIND_OUT, "sh", _CACHE, *argv],
        timeout=_TIMEOUT,
        check=False,
    )
    return tried.stdout if tried.returncode == 0 else b""


def _keep(kept: Path, argv: Sequence[str]) -> None:
    """Write the cache, whole or not at all.

    An empty folder marks that there is nothing to cache. Those of another boot are removed, and the
    oldest.
    """
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = FOLDER / f"{kept.name}.{os.getpid()}"
    # before CRIU is started: not again and again where nothing can be kept
    fresh.mkdir(mode=0o700, exist_ok=True)
    try:
        if found := _found_out(argv):
            (fresh / _CACHE.name).write_bytes(found)
        fresh.rename(kept)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # if another criuctl was faster
    known = sorted(os.scandir(FOLDER), key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
    of_this_boot = [entry for entry in known if entry.name.startswith(_boot())]
    for entry in known:
        if entry not in of_this_boot[:_KEPT]:
            shutil.rmtree(entry, ignore_errors=True)


def _link(target: str) -> None:
    """Make CRIU's cache a link to `target`, unless it is; CRIU removes it occasionally."""
    with suppress(OSError):
        if os.readlink(_CACHE) == target:
            return
    fresh = _CACHE.with_name(f"{_CACHE.name}.{os.getpid()}")
    try:
        fresh.symlink_to(target)
        if not _kept_by_criu(_CACHE):
            fresh.rename(_CACHE)
    finally:
        fresh.unlink(missing_ok=True)

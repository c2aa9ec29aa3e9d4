"""Set the machine up without a network, from the folder that `pack` filled, or use what
scripts/setup left.

The prefix has the shape that scripts/setup gives it: criu.json, criu/, pycriu/ and venv/, so that
criuctl finds CRIU by itself.  The environment sees the checkout, so what runs is the checkout's
code.  It lies outside of the checkout and is kept for the next call; a stamp says from which pack
it was made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .pack import commit_of

PREFIX = Path("/var/cache/criuctl-gpu-test")
TINI = Path("/usr/local/bin/tini")
WIDE_PIDS = 1 << 22
PID_MAX = Path("/proc/sys/kernel/pid_max")


@dataclass(frozen=True)
class Place:
    """Where everything is."""

    checkout: Path
    criuctl: tuple[str, ...]  # starts criuctl
    python: str  # runs the test programs
    criu: tuple[str, ...]  # starts CRIU
    criu_version: str
    tools: Path | None  # zstd, with its libraries in lib/
    commit: str

    def zstd(self) -> list[str] | None:
        """An argv that starts zstd."""
        found = shutil.which("zstd")
        if found:
            return [found]
        if self.tools and (self.tools / "zstd").exists():
            libraries = f"LD_LIBRARY_PATH={self.tools / 'lib'}"
            return ["env", libraries, str(self.tools / "zstd")]
        return None


def set_up(checkout: Path, pack: Path, python: str) -> Place:
    """Make criuctl ready; `python` is the interpreter of the test programs."""
    packed = (pack / "prefix.tar.gz").is_file()
    prefix = _unpack(checkout, pack) if packed else _installed(checkout)
    interpreter = prefix / "venv/bin/python" if packed else checkout / ".venv/bin/python"
    record = json.loads((prefix / "criu.json").read_text())
    # What was packed says so: a copy of the checkout may lack its newest commits.
    commit = (
        (pack / "commit").read_text().strip()
        if (pack / "commit").is_file()
        else commit_of(checkout)
    )
    return Place(
        checkout=checkout,
        criuctl=(str(interpreter), "-m", "criuctl"),
        python=python,
        criu=tuple(record["argv"]),
        criu_version=str(record["version"]),
        tools=pack / "tools" if packed else None,
        commit=commit or "unknown",
    )


def _installed(checkout: Path) -> Path:
    prefix = Path(os.environ.get("CRIUCTL_PREFIX") or "/opt/criuctl")
    if not (prefix / "criu.json").is_file() or not (checkout / ".venv/bin/python").exists():
        raise SystemExit(
            "error: neither a pack nor an installation is here\n"
            "hint: run `scripts/gpu-test pack` on a machine with a network, or `scripts/setup "
            "--dev` here"
        )
    return prefix


def _unpack(checkout: Path, pack: Path) -> Path:
    archive, wheels = pack / "prefix.tar.gz", sorted((pack / "wheels").glob("*.whl"))
    version = f"{platform.python_version()} {sys.executable} {checkout}"
    stamp = hashlib.sha256(archive.read_bytes() + version.encode())
    for wheel in wheels:
        stamp.update(wheel.name.encode())
    mark = PREFIX / "stamp"
    if mark.is_file() and mark.read_text() == stamp.hexdigest():
        return PREFIX
    shutil.rmtree(PREFIX, ignore_errors=True)
    PREFIX.mkdir(mode=0o700, parents=True)
    with tarfile.open(archive) as file:
        file.extractall(PREFIX, filter="tar")
    record = json.loads((PREFIX / "criu.json").read_text())
    origin = str(Path(record["pycriu"]).parent)
    record["argv"] = [word.replace(origin, str(PREFIX), 1) for word in record["argv"]]
    record["pycriu"] = str(PREFIX / "pycriu")
    (PREFIX / "criu.json").write_text(json.dumps(record, indent=2) + "\n")
    venv = PREFIX / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python3*/site-packages")
    quiet = ["-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-cache-dir"]
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *quiet,
        "--no-compile",
        "--target",
        str(site),
    ]
    subprocess.run([*install, *map(str, wheels)], check=True)
    (site / "criuctl-checkout.pth").write_text(f"{checkout}\n{PREFIX / 'pycriu'}\n")
    code = [str(checkout / "criuctl"), str(site), str(PREFIX / "pycriu")]
    compiling = [str(venv / "bin/python"), "-m", "compileall", "-q", "-j", "0", *code]
    subprocess.run(compiling, stdout=subprocess.DEVNULL, check=False)
    mark.write_text(stamp.hexdigest())
    return PREFIX


@contextlib.contextmanager
def machine(place: Place) -> Iterator[None]:
    """Lend the machine what the tests need of it: an init for sessions, and PIDs that are not used
    again soon.
    """
    if os.geteuid():
        raise SystemExit("error: this must run as root")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    lent = shutil.which("tini", path=path) is None
    if lent:
        if place.tools is None or not (place.tools / "tini").exists():
            raise SystemExit("error: tini is not installed\nhint: apt-get install tini")
        shutil.copy2(place.tools / "tini", TINI)
        TINI.chmod(0o755)
    before = PID_MAX.read_text()
    # A restore needs the PIDs of the dump; other tests that run at the same time would take them
    # where numbers soon begin again.
    with contextlib.suppress(OSError):
        if int(before) < WIDE_PIDS:
            PID_MAX.write_text(str(WIDE_PIDS))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            PID_MAX.write_text(before)
        if lent:
            TINI.unlink(missing_ok=True)

"""Gather what a machine without a network needs, into one folder that travels with the checkout.

prefix.tar.gz   CRIU with its loader and libraries, and pycriu, as scripts/setup left them
wheels/         criuctl's dependencies for the other machine's Python, without those of S3
tools/          tini and zstd with the libraries they need beyond the C library; used where the
                machine has none
commit          the commit of the checkout, and whether it had changes
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

LIMIT = 45 << 20
S3_ONLY = ("boto3",)
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_5_x86_64",
    "manylinux1_x86_64",
)
TOOLS = ("tini", "zstd")
C_LIBRARY = ("linux-vdso", "libc.so", "ld-linux", "libm.so", "libpthread.so", "libdl.so")


def pack(checkout: Path, folder: Path, python: str) -> int:
    """Fill `folder` for a machine with Python `python` ("3.12"); return its size in bytes."""
    prefix = Path(os.environ.get("CRIUCTL_PREFIX") or "/opt/criuctl")
    if not (prefix / "criu.json").is_file():
        raise SystemExit(f"error: there is no {prefix}/criu.json\nhint: run scripts/setup first")
    folder.mkdir(parents=True, exist_ok=True)
    _prefix(prefix, folder / "prefix.tar.gz")
    _wheels(checkout, folder / "wheels", python)
    _tools(folder / "tools")
    (folder / "commit").write_text(commit_of(checkout) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > LIMIT:
        raise SystemExit(f"error: {folder} has {size >> 20} MiB, more than {LIMIT >> 20} MiB")
    return size


def commit_of(checkout: Path) -> str:
    """The commit, with ``+changes`` where files differ from it; an empty string without git."""
    git = ["git", "-C", str(checkout), "-c", f"safe.directory={checkout}"]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], check=False, capture_output=True, text=True
        )
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", "criuctl"],
            check=False,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    if head.returncode:
        return ""
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _prefix(prefix: Path, archive: Path) -> None:
    record = json.loads((prefix / "criu.json").read_text())
    if not record["argv"][0].startswith(f"{prefix}/criu/"):
        raise SystemExit(
            f"error: CRIU is {record['argv'][0]}, not a private one with its own libraries\n"
            "hint: let scripts/setup install one: without CRIUCTL_CRIU, and without criu on the "
            "PATH"
        )

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "__pycache__" in entry.name or "/share/" in entry.name else entry

    with tarfile.open(archive, "w:gz") as file:
        for name in ("criu", "pycriu", "criu.json"):
            file.add(prefix / name, name, filter=wanted)


def _wheels(checkout: Path, folder: Path, python: str) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    needs = [need for need in project["dependencies"] if not need.startswith(S3_ONLY)]
    stamp = hashlib.sha256(json.dumps([needs, python, PLATFORMS]).encode()).hexdigest()
    mark = folder / ".stamp"
    if mark.is_file() and mark.read_text() == stamp:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--only-binary=:all:", "-d", str(folder)]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run(
        [*pip, "--python-version", python, "--implementation", "cp", *platforms, *needs], check=True
    )
    mark.write_text(stamp)


def _tools(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    for name in TOOLS:
        path = shutil.which(name)
        if path is None:
            print(f"note: no {name} here to take along", file=sys.stderr)
            continue
        shutil.copy2(path, folder / name)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            library, _, rest = line.strip().partition(" => ")
            if rest and not library.startswith(C_LIBRARY):
                shutil.copy2(rest.split()[0], folder / "lib" / library)

"""Write what the packages of a release were made of: SHA256SUMS and provenance.json.

provenance.py FOLDER COMMIT VERSION

provenance.json is an in-toto statement with a SLSA v1 predicate: the digests of the packages in
FOLDER, the commit, the builder, and the materials with their digests from python.lock and
criu.pins. SHA256SUMS has the packages and that file, so one signature on it is for all of them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

LIB = Path(__file__).parent
PACKAGES = ("*.whl", "*.deb", "*.tar.gz")


def digest(path: Path) -> str:
    """Return the file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def python_packages() -> list[dict[str, Any]]:
    """Return the packages of python.lock; each of their files has one of the digests."""
    found: list[dict[str, Any]] = []
    for line in (LIB / "python.lock").read_text().splitlines():
        words = line.strip().removesuffix("\\").strip()
        if words.startswith("--hash=sha256:"):
            found[-1]["annotations"]["sha256"].append(words.partition(":")[2])
        elif "==" in words and not words.startswith("#"):
            name, _, version = words.partition(";")[0].strip().partition("==")
            found.append({"uri": f"pkg:pypi/{name}@{version}", "annotations": {"sha256": []}})
    return found


def debian_packages() -> list[dict[str, Any]]:
    """Return the packages of criu.pins."""
    rows = (
        line.split()
        for line in (LIB / "criu.pins").read_text().splitlines()
        if line and not line.startswith("#")
    )
    return [
        {
            "uri": f"pkg:deb/debian/{name}@{version}?arch={architecture}",
            "digest": {"sha256": sha256},
        }
        for sha256, name, architecture, version in rows
    ]


def statement(packages: list[Path], commit: str, version: str) -> dict[str, Any]:
    """Return the in-toto statement."""
    pins = [
        {"name": f"scripts/lib/{name}", "digest": {"sha256": digest(LIB / name)}}
        for name in ("python.lock", "criu.pins")
    ]
    source = {"uri": f"git:{commit}", "digest": {"gitCommit": commit}}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": digest(path)}} for path in packages],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:criuctl:scripts/release",
                "externalParameters": {"version": version},
                "resolvedDependencies": [
                    source,
                    *pins,
                    *python_packages(),
                    *debian_packages(),
                ],
            },
            "runDetails": {
                "builder": {
                    "id": "urn:criuctl:scripts/release",
                    "version": {
                        "os": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
                        "architecture": platform.machine(),
                        "python": platform.python_version(),
                    },
                }
            },
        },
    }


def main(folder: Path, commit: str, version: str) -> int:
    """Write both files; 1 if the folder has no package of the version, or one of another."""
    packages = sorted(path for pattern in PACKAGES for path in folder.glob(pattern))
    # criuctl-VERSION-py3-none-any.whl, criuctl_VERSION+SUITE_ARCH.deb, criuctl-VERSION.tar.gz
    ours = re.compile(rf"criuctl[-_]{re.escape(version)}(?:-|\+|\.tar\.gz$)")
    others = [path.name for path in packages if not ours.match(path.name)]
    if not packages or others:
        problem = f"packages of another version: {', '.join(others)}" if others else "no package"
        print(f"error: {folder}: {problem}; the version is {version}", file=sys.stderr)
        return 1
    provenance = folder / "provenance.json"
    provenance.write_text(json.dumps(statement(packages, commit, version), indent=1) + "\n")
    lines = [f"{digest(path)}  {path.name}\n" for path in (*packages, provenance)]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))

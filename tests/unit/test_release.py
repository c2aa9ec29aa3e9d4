"""scripts/release: the package's version, CHANGELOG.md and the tag agree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.program import ROOT

LOG = """\
# Changelog

## 1.2.0 (2026-03-01)

### Added

- `new`.

## 1.1.0 (2026-01-31)

- Old.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small one, at the version 1.2.0, committed and tagged."""
    for folder in ("scripts", "criuctl"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts/release", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "criuctl/__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(LOG)
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "All")
    _git(tmp_path, "tag", "v1.2.0")
    return tmp_path


def _git(checkout: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@localhost")
    subprocess.run(["git", *who, *words], cwd=checkout, check=True, capture_output=True, timeout=60)


def _release(checkout: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [checkout / "scripts/release", *words],
        env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_all_agree(checkout: Path) -> None:
    assert _release(checkout, "check") == "good: 1.2.0, tag v1.2.0\n"
    assert _release(checkout, "notes") == "### Added\n\n- `new`.\n\n"
    _release(checkout, code=2)


def test_this_checkout_s_version_and_changelog_agree() -> None:
    _release(ROOT, "check")
    assert "### Added" in _release(ROOT, "notes")


def test_digests_and_provenance_name_packages_commit_and_materials(checkout: Path) -> None:
    """Of a clean checkout only, and of packages of this version only."""
    (checkout / "scripts/lib").mkdir()
    for name in ("provenance.py", "python.lock", "criu.pins"):
        shutil.copy(ROOT / "scripts/lib" / name, checkout / "scripts/lib")
    folder = checkout / "dist"
    folder.mkdir()
    names = ["criuctl-1.2.0-py3-none-any.whl", "criuctl_1.2.0+bookworm_amd64.deb"]
    for name in names:
        (folder / name).write_text(name)
    assert "not committed" in _release(checkout, "digests", code=1)
    (checkout / ".gitignore").write_text("/dist/\n")
    _git(checkout, "add", ".")
    _git(checkout, "commit", "-qm", "Release")
    _release(checkout, "digests")
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    listed = (folder / "SHA256SUMS").read_text().split()[1::2]
    assert listed == [*names, "provenance.json"]
    said = json.loads((folder / "provenance.json").read_text())
    assert [one["name"] for one in said["subject"]] == names
    materials = said["predicate"]["buildDefinition"]["resolvedDependencies"]
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout, text=True).strip()
    assert materials[0]["digest"] == {"gitCommit": head}
    assert all(one.get("digest") or one["annotations"]["sha256"] for one in materials)
    digests = (ROOT / "scripts/lib/python.lock").read_text().count("--hash=sha256:")
    assert sum(len(m.get("annotations", {}).get("sha256", ())) for m in materials) == digests
    assert any(one.get("uri", "").startswith("pkg:deb/debian/criu@") for one in materials)
    (folder / "criuctl-1.1.0-py3-none-any.whl").write_text("old")
    assert "criuctl-1.1.0" in _release(checkout, "digests", code=1)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("criuctl/__init__.py", "1.2.0", "1.3.0", "the tag is v1.2.0, the package is 1.3.0"),
        ("CHANGELOG.md", "2026-03-01", "unreleased", "still calls 1.2.0 unreleased"),
        ("CHANGELOG.md", "2026-03-01", "2026-02-30", "no such day"),
        ("CHANGELOG.md", "1.2.0", "1.2.1", 'begins with "## 1.2.1 (2026-03-01)"'),
        ("CHANGELOG.md", "- Old", "- Older", "not committed"),
        ("pyproject.toml", 'dynamic = ["version"]', 'version = "1.2.0"', "pyproject.toml"),
    ],
)
def test_each_difference_is_found(checkout: Path, file: str, old: str, new: str, said: str) -> None:
    path = checkout / file
    path.write_text(path.read_text().replace(old, new, 1))
    assert said in _release(checkout, "check", code=1)


def test_a_commit_without_a_tag_may_be_unreleased(checkout: Path) -> None:
    _git(checkout, "tag", "-d", "v1.2.0")
    path = checkout / "CHANGELOG.md"
    path.write_text(LOG.replace("2026-03-01", "unreleased"))
    assert _release(checkout, "check") == "good: 1.2.0\n"
    assert "the tag is v9" in _release(checkout, "check", "v9", code=1)

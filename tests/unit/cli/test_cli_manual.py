"""Pages for `man`: one per command, topic and runbook, from the same help, that groff and man take
without a word.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from criuctl import config
from criuctl.cli import manual, topics
from criuctl.cli.app import PROGRAM
from criuctl.cli.main import cli
from criuctl.cli.pages import PageContext

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man")
    manual.write_pages(cli, PROGRAM, folder)
    return folder


def shown(page: Path) -> str:
    """What `man` shows of a page; it must have nothing to say about it."""
    done = subprocess.run(
        ["man", "--warnings", "--nh", "--nj", "-E", "UTF-8", "-P", "cat", "-l", page],
        env={"MANWIDTH": "100", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return " ".join(done.stdout.split())


def test_every_command_topic_and_runbook_has_a_page(pages: Path) -> None:
    def names(command: dict[str, Any], path: str) -> Iterator[str]:
        yield path
        for name, inner in command.get("commands", {}).items():
            yield from names(inner, f"{path}-{name}")

    commands = set(names(cli.to_info_dict(PageContext(cli, info_name=PROGRAM)), PROGRAM))
    assert {"criuctl", "criuctl-dump", "criuctl-store-init"} <= commands
    assert {path.name for path in (pages / "man1").iterdir()} == {f"{name}.1" for name in commands}
    assert {path.name for path in (pages / "man5").iterdir()} == {
        f"{PROGRAM}-config.5",
        f"{PROGRAM}-configuration.5",
    }
    assert {path.name for path in (pages / "man7").iterdir()} == {
        f"{PROGRAM}-{name}.7" for name in topics.names() if name != "configuration"
    }
    other = pages / "man5" / f"{PROGRAM}-configuration.5"
    assert other.read_text() == f".so man5/{PROGRAM}-config.5\n"
    for path in {*pages.glob("man?/*")} - {other}:
        text = path.read_text()
        assert text.startswith(".TH ") and text.splitlines()[1] == ".SH NAME"


@pytest.mark.parametrize(
    "name", ["criuctl.1", "criuctl-dump.1", "criuctl-store-init.1", "criuctl-prune.1"]
)
def test_a_page_says_what_the_help_says(pages: Path, name: str, criuctl: Run) -> None:
    words = name.removesuffix(".1").split("-")[1:]
    page, text = shown(pages / "man1" / name), criuctl("help", *words, env={"COLUMNS": "80"}).stdout
    for word in {
        word.strip("`,.;:()")
        for word in text.split()
        if "-" not in word.strip("-") or word.startswith("--")
    }:
        assert word in page, word
    for example in (
        line.strip()
        for line in text.splitlines()
        if line.strip().startswith("criuctl ") and line.startswith("      ")
    ):
        assert " ".join(example.split()) in page


def test_the_main_page_has_variables_and_files(pages: Path) -> None:
    page = shown(pages / "man1" / "criuctl.1")
    variables, files = page.partition(" ENVIRONMENT ")[2].partition(" FILES ")[::2]
    for name in ("CRIUCTL_STORE", "CRIUCTL_PASSPHRASE", "AWS_ENDPOINT_URL", "XDG_CONFIG_HOME"):
        assert name in variables
    for name in ("/etc/criuctl/config.yaml", "/etc/criuctl/keys", "/var/lib/criuctl/store"):
        assert name in files


def test_the_page_of_the_configuration_has_every_key(pages: Path) -> None:
    page = shown(pages / "man5" / "criuctl-config.5")
    assert page.startswith("CRIUCTL-CONFIG(5)")
    assert [key for key in config.KEYS if f" {key}: " not in page] == []


def test_a_runbook_s_page(pages: Path) -> None:
    page = shown(pages / "man7" / "criuctl-store-lost.7")
    assert "criuctl-store-lost - a store is gone or damaged" in page
    assert (
        "SO THAT IT DOES NOT HAPPEN AGAIN" in page
        and 'criuctl import "$EXPORTED" --store "$NEW_STORE"' in page
    )


def test_what_roff_would_take_for_its_own_is_kept() -> None:
    assert (
        manual.inline(".de and 'so' and a \\ are text")
        == "\\&.de and \\(aqso\\(aq and a \\e are text"
    )
    assert manual.inline("see `dump --with-files .x`, or -q; a well-known word") == (
        "see \\fBdump \\-\\-with\\-files .x\\fR, or \\-q; a well-known word"
    )


def test_the_command_writes_them_and_removes_old_ones(criuctl: Run, tmp_path: Path) -> None:
    old, foreign = tmp_path / "man1" / "criuctl-gone.1", tmp_path / "man1" / "ls.1"
    old.parent.mkdir()
    old.touch()
    foreign.touch()
    done = criuctl("help", "--man-pages", str(tmp_path))
    assert done.returncode == 0 and "pages below" in done.stdout
    assert (
        not old.exists()
        and foreign.exists()
        and (tmp_path / "man7" / "criuctl-key-lost.7").exists()
    )
    assert criuctl("help", "gc", "--man-pages", str(tmp_path)).returncode == 2
    assert criuctl("help", "--man-pages", "/proc/nowhere").returncode == 2

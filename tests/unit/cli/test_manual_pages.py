"""The manual's pages, the README and the runbooks: they render, they are complete, their links lead
somewhere, and their lines fit.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from criuctl import config
from criuctl.cli import topics
from criuctl.cli.main import COMMANDS
from criuctl.config import Config
from criuctl.errors import EXIT_CODES
from criuctl.repairs.registry import ALL, losses

Run = Callable[..., subprocess.CompletedProcess[str]]
PROJECT = Path(__file__).resolve().parents[3]
MANUAL = PROJECT / "criuctl" / "manual"
WRITTEN = [
    *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(MANUAL.glob("*.md")),
    *sorted((PROJECT / "criuctl" / "cli" / "runbooks").glob("*.md")),
]
KEYS = sorted(config.KEYS)
SUBJECTS = (
    "adapters agents architecture configuration connection-policies environment-and-files "
    "forks json-and-exit-codes kubernetes limits linked-sessions migration monitoring python-api "
    "scheduling-and-supervision sessions sharing slurm-jobs spot-machines steps stores-and-keys"
)


def test_the_pages_there_are() -> None:
    assert topics.pages() == SUBJECTS.split()
    assert not {*topics.names()} & {*COMMANDS}, "`criuctl help` would show the command's page"


@pytest.mark.parametrize("name", topics.names())
def test_every_page_renders(name: str, criuctl: Run) -> None:
    done = criuctl("help", name, env={"COLUMNS": "80"})
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"NAME\n  {name} - ")
    shown = " ".join(done.stdout.split())
    for block, lines in topics.blocks(topics.body(name)):
        if block == "lines":
            for line in lines:
                assert f"      {line}".rstrip() in done.stdout.splitlines()
        elif lines[0].startswith("## "):
            assert lines[0].removeprefix("## ").upper() in done.stdout.splitlines()
        else:
            for word in re.findall(r"`([^`\s]+)`", " ".join(lines)):
                assert word in shown.replace("- ", "-"), word
    prose = re.sub(r"(?m)^ {6}.*$", "", done.stdout)
    assert "](" not in done.stdout and "**" not in re.sub(r"`[^`]*`", "", prose)
    assert all(len(line) <= 80 for line in prose.splitlines())


def test_json_has_the_page_as_it_is_written(criuctl: Run) -> None:
    done = criuctl("help", "limits", "--json")
    assert json.loads(done.stdout) == {"topic": "limits", "text": topics.text("limits").rstrip()}
    assert "runbook" in json.loads(criuctl("help", "key-lost", "--json").stdout)


def test_help_lists_all_of_them(criuctl: Run) -> None:
    listed = {line.split()[0] for line in criuctl("help").stdout.splitlines() if line.split()}
    assert {*topics.names()} <= listed
    assert criuctl("help", "no-such-topic").returncode == 2


def _keys() -> dict[str, str]:
    """Key -> the item about it on the configuration's page."""
    items = [
        " ".join(lines)
        for block, lines in topics.blocks(topics.text("configuration"))
        if block == "item"
    ]
    return {item.split("`")[1]: item for item in items}


def test_the_configuration_s_page_has_every_key() -> None:
    assert sorted(_keys()) == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_default_and_example_of_a_key(key: str, tmp_path: Path) -> None:
    found = re.fullmatch(r".* Default: `(.*?)`\. Example: `(.*)`", _keys()[key])
    assert found, _keys()[key]
    default, example = found.groups()

    def loaded(text: str) -> object:
        file = tmp_path / "config.yaml"
        file.write_text(text)
        assert list(yaml.safe_load(text)) == [key]
        return getattr(config.load(str(file), environ={"XDG_CONFIG_HOME": str(tmp_path)}), key)

    wanted = config.MAX_FREEZE if key == "max_freeze" else getattr(Config(), key)
    assert loaded(f"{key}: {default}") == wanted
    assert loaded(example) != wanted


def test_every_exit_code_is_on_its_page() -> None:
    items = [
        " ".join(lines)
        for block, lines in topics.blocks(topics.text("json-and-exit-codes"))
        if block == "item"
    ]
    assert [item for item in items if re.match(r"`\d+`:", item)] == [
        f"`{code}`: {text}." for code, text in EXIT_CODES.items()
    ]


def test_every_repair_is_on_the_page_of_limits() -> None:
    """CONTRIBUTING.md has the command that prints what must be there."""
    assert all(repair.loses.endswith(".") for repair in ALL)
    part = topics.text("limits").partition("## What CRIU loses and criuctl repairs\n")[2]
    assert losses() in part.partition("\n## ")[0]


def test_what_a_repair_restores_is_not_listed_as_lost() -> None:
    part = topics.text("limits").partition("## What is lost without a warning\n")[2]
    lost = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", part.partition("\n## ")[0]))
    assert lost and not lost & set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", losses()))


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: file.name)
def test_links_lead_to_files_and_lines_fit(file: Path) -> None:
    text = file.read_text()
    assert [line for line in text.splitlines() if len(line) > 100] == []
    for target in topics.links(text):
        if not target.startswith("https://"):
            assert (file.parent / target).exists(), target
    if file.parent == MANUAL:
        for target in topics.links(text):
            assert "/" in target or target.removesuffix(".md") in topics.pages(), target
        for name in re.findall(r"`criuctl help ([a-z-]+)`", text):
            assert name in (*topics.names(), *COMMANDS), name


def test_the_readme_is_short_and_links_every_page() -> None:
    text = (PROJECT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert {f"criuctl/manual/{name}.md" for name in topics.pages()} <= {*topics.links(text)}
    for program in ("quickstart", "test", "setup"):
        assert f"scripts/{program}" in text
        assert (PROJECT / "scripts" / program).is_file()

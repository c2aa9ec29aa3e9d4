"""Every command's manual page, and what the program imports before a command is invoked."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator

import click
import pytest
from support.program import clean_environment

from criuctl.cli.app import PROGRAM
from criuctl.cli.main import COMMANDS, cli
from criuctl.cli.pages import GlobalOption, LazyGroup, Page, PageContext
from criuctl.errors import EXIT_CODES
from criuctl.hooks.contract import PHASES

Run = Callable[..., subprocess.CompletedProcess[str]]


def all_commands() -> Iterator[tuple[str, click.Context]]:
    """(words after criuctl, context) of the group and of every command under it."""
    todo: list[tuple[list[str], click.Context]] = [([], PageContext(cli, info_name=PROGRAM))]
    while todo:
        words, ctx = todo.pop()
        yield " ".join(words), ctx
        if isinstance(ctx.command, LazyGroup):
            for name in ctx.command.list_commands(ctx):
                command = ctx.command.get_command(ctx, name)
                assert command is not None
                todo.append(([*words, name], PageContext(command, info_name=name, parent=ctx)))


PAGES = dict(all_commands())


def test_the_contract_s_commands_are_there() -> None:
    wanted = {
        "check",
        "connections",
        "dump",
        "restore",
        "list",
        "show",
        "verify",
        "rm",
        "snapshot",
        "store",
        "doctor",
        "version",
    }
    assert wanted | {"diff", "export", "import", "schedule"} <= set(COMMANDS)
    assert {"store init", "store info", "store key"} <= set(PAGES)


@pytest.mark.parametrize("words", sorted(PAGES))
def test_a_page_has_all_sections_and_fits_80_columns(criuctl: Run, words: str) -> None:
    done = criuctl(*words.split(), "--help", env={"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    headings = [line for line in lines if line and not line.startswith(" ")]
    expected = [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "GLOBAL OPTIONS",
        "EXAMPLES",
        "EXIT STATUS",
    ]
    assert [h for h in headings if h in expected] == expected
    assert all(line == line.rstrip() for line in lines)
    # An example that is to be copied is not wrapped; everything else is.
    examples = {
        part.strip()
        for _, example in PAGES[words].command.examples  # type: ignore[attr-defined]
        for part in example.splitlines()
    }  # all are Page or LazyGroup
    assert [line for line in lines if len(line) > 80 and line.strip() not in examples] == []
    assert [example for example in examples if len(example) > 74] == []


@pytest.mark.parametrize("words", sorted(PAGES))
def test_everything_on_a_page_is_explained(words: str) -> None:
    ctx = PAGES[words]
    command = ctx.command
    assert isinstance(command, Page | LazyGroup)
    assert command.help
    for param in command.params:
        assert isinstance(param, click.Option | click.Argument)
        assert param.help, f"{words}: {param.name} is not explained"
        if (
            isinstance(param, click.Option)
            and not isinstance(param, GlobalOption)
            and not param.is_flag
            and not param.multiple
        ):
            shown = param.get_help_record(ctx)
            assert shown is not None
            assert "default:" in shown[1], f"{words}: {param.name} shows no default"
    assert set(command.exits) <= set(EXIT_CODES)
    for name in command.see_also:
        assert name.removeprefix("criuctl ") in PAGES
    for entry in command.entries.values() if isinstance(command, LazyGroup) else ():
        assert entry.summary[0].isupper()
        assert entry.summary.endswith(".")


@pytest.mark.parametrize("words", sorted(PAGES))
def test_every_example_parses(words: str) -> None:
    """An example's criuctl command line is one that criuctl accepts (nothing is run)."""
    examples = PAGES[words].command.examples  # type: ignore[attr-defined]  # all are Page or LazyGroup
    for _, example in examples:
        for line in example.splitlines():
            line = line.partition(" | ")[0].partition(" > ")[0]
            assert "criuctl " in line or example.startswith("criuctl "), line
            if "criuctl " not in line:
                continue
            begin = line.index("criuctl ")
            args = shlex.split(line[begin:])[1:]
            ctx: click.Context = PageContext(cli, info_name=PROGRAM)
            while isinstance(ctx.command, LazyGroup):
                args = ctx.command.expanded(args)
                found = ctx.command.get_command(ctx, args[0])
                assert found is not None, line
                if isinstance(found, LazyGroup):
                    ctx, args = PageContext(found, info_name=args[0], parent=ctx), args[1:]
                else:
                    ctx = found.make_context(args[0], args[1:], parent=ctx)


def test_help_words_show_the_same_page(criuctl: Run) -> None:
    assert criuctl("help", "store", "init").stdout == criuctl("store", "init", "-h").stdout
    assert criuctl("help").stdout == criuctl("--help").stdout


HEAVY = [
    "aiohttp",
    "rich",
    "boto3",
    "botocore",
    "pycriu",
    "google.protobuf",
    "cryptography",
    "zstandard",
    "sqlite3",
    "blake3",
    "yaml",
]


def imported_by(*args: str) -> set[str]:
    """The modules that are loaded when criuctl has done this."""
    script = (
        f"import sys; from criuctl.cli.main import main; main({args!r}); print(*sys.modules, "
        "file=sys.stderr)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "args", [("--help",), ("dump", "--help"), ("list", "--bad-option"), ("--version",)]
)
def test_nothing_heavy_is_imported_to_start(args: tuple[str, ...]) -> None:
    loaded = imported_by(*args)
    assert [m for m in HEAVY if m in loaded] == []
    assert [
        m
        for m in loaded
        if m.startswith(("criuctl.ops", "criuctl.store", "criuctl.criu", "criuctl.checkpoint"))
    ] == []


def test_a_group_s_help_imports_no_command() -> None:
    assert [m for m in imported_by("--help") if m.startswith("criuctl.cli.commands")] == []


def test_the_page_of_hooks_names_every_phase() -> None:
    words = re.findall(r"[\w-]+", PAGES["hooks"].command.help or "")
    assert [phase for phase in PHASES if phase not in words] == []

"""What people copy out of a message: each value inside of a command in it is quoted for a shell."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.cli.main import COMMANDS
from criuctl.host.failures.remedies import REMEDIES
from criuctl.quoting import quoted

PACKAGE = Path(__file__).parent.parent.parent / "criuctl"

HOSTILE = {
    "a command": "/srv/; rm -rf ~",
    "a substitution": "$(reboot)`reboot`",
    "quotes": 'it\'s "x"',
    "a new line": "a\nrm -rf ~\n",
    "an escape sequence": "\x1b]0;title\x07\x1b[2J",
    "no text": "a\udcff\udc80b",
    "written from right to left": "a\u202eb",
    "a backslash": "a\\",
    "empty": "",
    "not ASCII": "größe",
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_shell_reads_it_as_one_word(value: str) -> None:
    line = f"printf %s {quoted(value)}"
    assert line.isprintable()
    assert subprocess.run(
        ["bash", "-c", line], capture_output=True, check=True
    ).stdout == value.encode(errors="surrogateescape")


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_becomes_one_printable_word(value: str) -> None:
    assert quoted(value).isprintable()


def test_what_needs_no_quotes_has_none() -> None:
    assert [
        quoted(one) for one in ("web@3", "/srv/a-b_c.d", "s3://bucket/x", "ssh://root@host:22", 7)
    ] == [*("web@3", "/srv/a-b_c.d", "s3://bucket/x", "ssh://root@host:22", "7")]


# Where a command begins that is not between backquotes.
_COMMAND = re.compile(
    rf"(?:^|[:;] |\bor )(?:criuctl (?:{'|'.join(COMMANDS)})"
    r"|chmod|chown|mkdir|rm|mount|nsenter|ssh)\b[^.,;:`]*$|--[a-z-]+ $"
)
_NUMBER = re.compile(r"(^|\.|_)(pid|prefix|port)$")


def commands(tree: ast.Module) -> Iterator[tuple[ast.JoinedStr, ast.FormattedValue, set[str]]]:
    """The values inside of commands in the f-strings of a module, and the names in reach that hold
    quoted words.
    """
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Module)]:
        words = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and (is_quoted(node.value) or isinstance(node.value, ast.JoinedStr))
            for target in node.targets
            if isinstance(target, ast.Name)
            and not (isinstance(node.value, ast.JoinedStr) and target.id != "make")
        }
        nested = {
            id(n)
            for f in ast.walk(function)
            if isinstance(f, ast.FunctionDef) and f is not function
            for n in ast.walk(f)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.JoinedStr) and id(node) not in nested:
                text = ""
                for value in node.values:
                    if isinstance(value, ast.Constant):
                        text += str(value.value)
                        continue
                    assert isinstance(value, ast.FormattedValue)
                    if text.count("`") % 2 or _COMMAND.search(text):
                        yield node, value, words
                    text += "X"


def is_quoted(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("quoted", "shlex.quote")


def harmless(value: ast.FormattedValue, words: set[str]) -> bool:
    """Quoted, a number, or one of several texts of ours."""
    text = ast.unparse(value.value)
    if is_quoted(value.value) or text in words or _NUMBER.search(text):
        return True
    if value.format_spec is not None and re.search(r"[dox]'$", ast.unparse(value.format_spec)):
        return True
    if isinstance(value.value, ast.BinOp):
        return True  # no text is made of these
    if isinstance(value.value, ast.Call) and ast.unparse(value.value.func) in ("max", "min"):
        return True
    return isinstance(value.value, ast.IfExp) and all(
        isinstance(one, ast.Constant) for one in (value.value.body, value.value.orelse)
    )


# Not copied into a shell, or made of constants alone.
OURS = {
    ("cli/failures.py", "PROGRAM"),
    ("cli/failures.py", "path"),  # of commands of ours
    ("cli/man_formatter.py", "name"),  # of a page of the manual
    ("files/missing_paths.py", "make"),  # one of two commands
    ("dump/checks/known_programs.py", "' '.join((f'{name}=1' for name in FIREFOX))"),  # constants
    ("proc/ownership.py", "fault.remedy"),  # a command with its path quoted, by proc/trustedpath.py
    ("ops/migrate.py", "wanted"),  # by which reports name a rule
    # one of three words of ours
    ("host/rights.py", "right"),
    ("session/protocol.py", "command"),
    ("share/start.py", "role"),
    # of a regular expression, not of a command
    ("session/screen/screen.py", "NARROW"),
    ("session/screen/screen.py", "_STRING_END"),
    ("session/screen/screen.py", "_INSIDE"),
    # the mark in a crontab, by which the line is found; a schedule's name
    ("ops/scheduling/timers.py", "name"),
}


def test_each_value_in_a_command_is_quoted() -> None:
    found, seen = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node, value, words in commands(ast.parse(path.read_text())):
            seen += 1
            if not harmless(value, words) and (name, ast.unparse(value.value)) not in OURS:
                found.append(
                    f"{name}:{node.lineno}: {{{ast.unparse(value.value)}}} is not quoted in "
                    f"{ast.unparse(node)}"
                )
    assert found == []
    assert seen > 60


def test_remedies_of_criu_s_failures_name_nothing_of_its_log() -> None:
    assert [remedy.hint for remedy in REMEDIES if "{" in remedy.hint] == []


@pytest.mark.parametrize(
    ("code", "good"),
    [
        ('f"`chmod 600 {path}`"', False),
        ('f"chmod 600 {path}"', False),
        ('f"Remove it: criuctl rm {ref}"', False),
        ('f"Take it: --with-files {path}."', False),
        ('f"`chmod 600 {quoted(path)}`"', True),
        ('f"`kill {process.pid}` and {path}"', True),
        ('f"{path} is gone"', True),
        ('f"`mkdir` makes {path}"', True),
    ],
)
def test_the_search_finds_what_is_not_quoted(code: str, good: bool) -> None:
    assert all(harmless(value, words) for _node, value, words in commands(ast.parse(code))) == good

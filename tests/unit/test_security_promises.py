"""SECURITY.md: every promise names a test that attacks it, and every test that is named exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parent.parent.parent
ATTACKS = PROJECT / "tests" / "attack"
HARNESS = "tests/attack/test_laboratory.py"  # shows that the attacks' own tools work
_NAMED = re.compile(r"`(tests/attack/[\w/.-]+\.py)(?:::(\w+))?`")
_ANY_TEST = re.compile(r"`(tests/[\w/.-]+\.py)(?:::(\w+))?`")


def promises(text: str) -> Iterator[str]:
    """The items of the lists under `### Holds`, each with its continued lines."""
    for section in re.split(r"^(?=#{2,3} )", text, flags=re.MULTILINE):
        if section.startswith("### Holds\n"):
            for item in re.split(r"^(?=- )", section, flags=re.MULTILINE)[1:]:
                yield item.split("\n\n")[0].strip()


def functions_of(path: Path) -> set[str]:
    """The names of the test functions in a file."""
    tree = ast.parse(path.read_text())
    found = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {name for name in found if name.startswith("test_")}


def test_each_promise_names_a_test() -> None:
    found = list(promises((PROJECT / "SECURITY.md").read_text()))
    assert found
    assert [promise for promise in found if not _NAMED.search(promise)] == []


def test_each_test_that_is_named_exists() -> None:
    named = _ANY_TEST.findall((PROJECT / "SECURITY.md").read_text())
    assert named
    for file, name in named:
        assert (PROJECT / file).is_file(), file
        assert not name or name in functions_of(PROJECT / file), f"{file}::{name}"


def test_each_attack_proves_a_promise() -> None:
    """An attack that no promise names is one that a reader of SECURITY.md does not know of."""
    named = {file for file, _name in _NAMED.findall((PROJECT / "SECURITY.md").read_text())}
    files = {str(path.relative_to(PROJECT)) for path in ATTACKS.rglob("test_*.py")} - {HARNESS}
    assert files - named == set()


def test_a_promise_without_a_test_is_noticed() -> None:
    text = (
        "### Holds\n\n- One\n  more `tests/attack/test_x.py::test_y`.\n- Two.\n\ntext\n\n### Does "
        "not hold\n\n- Three.\n"
    )
    found = list(promises(text))
    assert [bool(_NAMED.search(promise)) for promise in found] == [True, False]

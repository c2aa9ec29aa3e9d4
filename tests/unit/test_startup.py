"""Modules that are loaded at their first use."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from criuctl.startup import SELDOM

PRELUDE = "import sys; from criuctl.startup import lazily; lazily()\n"


def run(code: str, *folders: Path) -> str:
    """What it prints, in a Python of its own that loads modules so; those in `folders` are
    criuctl's own.
    """
    extend = "".join(
        f"import criuctl; criuctl.__path__.append({str(folder)!r})\n" for folder in folders
    )
    done = subprocess.run(
        [sys.executable, "-c", extend + PRELUDE + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(SELDOM))
def test_there_are_such_modules(name: str) -> None:
    """A library that has renamed one would be loaded at once again, unseen."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations is None


def test_a_module_is_run_when_it_is_first_looked_at(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("print('loaded')\nvalue = 7\n")
    code = (
        "from criuctl import late\nimport criuctl.late\nfrom criuctl import late as "
        "again\nprint('imported')\n"
        "print(again.value, late.__name__, late.__file__ is not None, late is "
        "sys.modules['criuctl.late'])\n"
        "late.value = 8\nprint(again.value, type(late).__name__)"
    )
    assert run(code, tmp_path).splitlines() == [
        "imported",
        "loaded",
        "7 criuctl.late True True",
        "8 module",
    ]


def test_a_name_that_is_imported_loads_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("print('loaded')\nvalue = 7\n")
    assert run("from criuctl.late import value\nprint(value)", tmp_path).splitlines() == [
        "loaded",
        "7",
    ]


def test_what_is_set_or_removed_first_is_set_in_the_loaded_module(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("value, other = 7, 8\n")
    code = (
        "from criuctl import late\nlate.value = 9\ndel late.other\nprint(late.value, "
        "hasattr(late, 'other'))"
    )
    assert run(code, tmp_path) == "9 False\n"


def test_modules_that_need_each_other(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from . import two\ndef f():\n    return two.g() + 1\n")
    (tmp_path / "two.py").write_text(
        "from . import one\ndef g():\n    return 1\ndef h():\n    return one.f()\n"
    )
    assert run("from criuctl import two\nprint(two.h())", tmp_path) == "2\n"


def test_threads_that_look_at_once_see_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import time\nprint('loaded')\ntime.sleep(0.3)\nvalue = 7\n")
    code = (
        "import threading\nfrom criuctl import late\nseen = []\n"
        "threads = [threading.Thread(target=lambda: seen.append(late.value)) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\nprint(seen)"
    )
    assert run(code, tmp_path).splitlines() == ["loaded", str([7] * 8)]


def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import time\nprint('loading', flush=True)\ntime.sleep(0.5)\nvalue = 7\n"
    )
    code = (
        "import os, threading, time\nfrom criuctl import late\n"
        "thread = threading.Thread(target=lambda: late.value)\nthread.start()\ntime.sleep(0.1)\n"
        "pid = os.fork()\nif pid == 0:\n    print(late.value, flush=True)\n    os._exit(0)\n"
        "os.waitpid(pid, 0)\nthread.join()\nprint(late.value)"
    )
    assert run(code, tmp_path).splitlines() == ["loading", "7", "7"]


def test_a_fork_in_the_middle_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nfrom . import other\nvalue "
        "= other.value\n"
    )
    (tmp_path / "other.py").write_text("value = 7\n")
    assert (
        run(
            "from criuctl import late\nprint(late.value, flush=True)\nimport os\nos._exit(0)",
            tmp_path,
        )
        == "7\n7\n"
    )


def test_all_that_waits_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("from . import other\nprint('late')\n")
    (tmp_path / "other.py").write_text("print('other')\n")
    code = (
        "from criuctl import late\nfrom criuctl.startup import "
        "settle\nsettle()\nprint('settled')\nlate.other.__name__"
    )
    assert run(code, tmp_path).splitlines() == ["late", "other", "settled"]


def test_a_module_that_fails_fails_where_it_is_used_each_time(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("print('tried')\nraise ValueError('no')\n")
    code = (
        "from criuctl import late\nfor _ in 1, 2:\n    try:\n        late.value\n    except "
        "ValueError as e:\n        print(e)"
    )
    assert run(code, tmp_path).splitlines() == ["tried", "no"] * 2


def test_packages_and_what_is_no_module_are_as_ever(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("print('loaded')\n")
    code = (
        "import criuctl.pack\ntry:\n    import criuctl.nowhere\nexcept ModuleNotFoundError as "
        "e:\n    print(e.name)"
    )
    assert run(code, tmp_path).splitlines() == ["loaded", "criuctl.nowhere"]


def test_a_dump_and_a_restore_load_nothing_that_takes_long_for_nothing() -> None:
    """What each of these costs at a start is documented in the modules that do without them."""
    heavy = {
        "asyncio",
        "boto3",
        "botocore",
        "concurrent.futures",
        "dataclasses",
        "logging",
        "pycriu",
        "rich",
    }
    code = (
        "from criuctl.cli.main import main\n"
        "from criuctl.cli.commands import dump, restore\ndump.dump, restore.restore\n"
        "from criuctl.dump import story as dump\nfrom criuctl.restore import story as restore\n"
        "dump.dump, restore.restore\nprint(*sys.modules)"
    )
    assert heavy.isdisjoint(run(code).split())

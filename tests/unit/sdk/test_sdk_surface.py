"""The surface of the Python API: what is exported, documented, and there for coroutines too."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import criuctl
from criuctl import sdk
from criuctl.cli import topics
from criuctl.config import Config
from criuctl.errors import CriuctlError, UsageError
from criuctl.sdk import AsyncCommand, AsyncLease, AsyncSession, Command, Group, Lease, Session
from criuctl.sdk.operator import Operator

PAIRS: list[tuple[type, type]] = [
    (Session, AsyncSession),
    (Command, AsyncCommand),
    (Lease, AsyncLease),
]


def public(kind: type) -> dict[str, Any]:
    """The public attributes of a class, without those of every class."""
    return {
        name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")
    }


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, defaults and kinds; annotations differ in the names of the classes alone."""
    called: Callable[..., Any] = getattr(function, "__func__", function)
    signature = inspect.signature(inspect.unwrap(called))
    return [(one.name, one.default, one.kind) for one in signature.parameters.values()]


@pytest.mark.parametrize(("blocking", "coroutines"), PAIRS)
def test_coroutines_are_the_same_calls(blocking: type, coroutines: type) -> None:
    calls, same = public(blocking), public(coroutines)
    more = {"restored"} if blocking is Session else set()  # an attribute of each object
    assert set(calls) | more == set(same)
    for name, call in calls.items():
        if isinstance(call, property):
            assert isinstance(same[name], property)
            continue
        assert parameters(call) == parameters(same[name]), name
        assert inspect.getdoc(getattr(coroutines, name)), name
        if name not in ("command", "hold"):
            assert inspect.iscoroutinefunction(getattr(coroutines, name)), name


def test_every_call_is_documented_and_on_its_page() -> None:
    text = topics.text("python-api")
    for kind in (Session, Command, Lease, Group):
        for name in public(kind):
            assert inspect.getdoc(getattr(kind, name)), name
            assert re.search(rf"\b{name}\b[`(.]", text), name
    for name in sdk.__all__:
        assert inspect.getdoc(getattr(sdk, name)), name


def test_what_the_package_exports() -> None:
    """It is imported when it is asked for: the command line starts without it."""
    assert {name: getattr(criuctl, name) for name in criuctl.__all__} == {
        "AsyncSession": sdk.AsyncSession,
        "Checkpoint": sdk.Checkpoint,
        "CriuctlError": CriuctlError,
        "Group": sdk.Group,
        "Session": sdk.Session,
        "__version__": criuctl.__version__,
    }
    with pytest.raises(AttributeError):
        _ = criuctl.no_such_name
    look = "import criuctl, sys; print([m for m in sys.modules if m.startswith('criuctl.')])"
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_an_operator_that_cannot_be() -> None:
    config = Config()
    for kind, role in (("robot", "write"), ("agent", "root")):
        with pytest.raises(UsageError):
            Operator(config, "work", kind, "", role)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Session.connect("work")  # type: ignore[call-arg]

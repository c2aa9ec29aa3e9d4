"""Modules that are loaded when they are first used, not when they are imported.

A command that dumps a small tree takes a quarter of a second, and a third of that was Python
reading modules of which it used nothing: what only failures need, what only containers need, what
click and msgspec import for others.  `lazily` has the import system hand out such a module empty;
the first look at one of its attributes reads and runs it.

Who writes ``from module import name`` looks at once and gains nothing; who imports the module
itself (``from . import overlays``) does.  All of criuctl's own modules are loaded so, and of other
people's those in `SELDOM`: they have no effect but to be there.  Packages are loaded at once, for
the sake of what lies in them.

importlib has a LazyLoader; that of Python 3.11 loads at a second import, too, and shows other
threads half a module.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

SELDOM = frozenset(
    {
        "ast",
        "dis",
        "google.protobuf.internal.python_message",
        "google.protobuf.text_format",
        "google.protobuf.descriptor_database",
        "google.protobuf.text_encoding",
        "google.protobuf.internal.python_edition_defaults",
        "google.protobuf.service_reflection",
        "hashlib",
        "hmac",
        "inspect",
        "ipaddress",
        "linecache",
        "msgspec._json_schema",
        "msgspec.inspect",
        "msgspec.json",
        "msgspec.msgpack",
        "msgspec.toml",
        "msgspec.yaml",
        "pickle",
        "platform",
        "random",
        "secrets",
        "shlex",
        "shutil",
        "subprocess",
        "textwrap",
        "tokenize",
        "traceback",
    }
)
"""Of the standard library and of others: what a plain dump and restore have imported, by others
mostly, and do not use.
"""

_PATIENCE = 1.0  # seconds
_OWN = f"{__package__}."
_PLAIN = frozenset({"__class__", "__dict__", "__spec__"})  # what the import system itself looks at


class _Later(ModuleType):
    """A module that has not been looked at."""

    def __getattribute__(self, name: str) -> Any:
        if name not in _PLAIN:
            _load(self)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _PLAIN:
            _load(self)
        ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _load(self)
        ModuleType.__delattr__(self, name)


class _Loader(SourceFileLoader):
    """Lets a module wait."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self.lock = threading.RLock()  # who loads it; others wait until all of it is there
        self.loading = False

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Later

    def run(self, module: ModuleType) -> None:
        """Run its code."""
        super().exec_module(module)


_busy: dict[_Loader, int] = {}  # that run a module's code, by the thread which lets them


def _load(module: ModuleType) -> None:
    loader = module.__dict__["__loader__"]
    with loader.lock:
        # by itself, in a circle; or meanwhile by another thread
        if loader.loading or type(module) is not _Later:
            return
        loader.loading = True
        _busy[loader] = threading.get_ident()
        try:
            loader.run(module)
        finally:
            _busy.pop(loader, None)
            loader.loading = False
        ModuleType.__setattr__(module, "__class__", ModuleType)


def _before_fork() -> None:
    """Wait for what other threads are loading, unless one waits for us: in the child nobody would
    finish it.
    """
    for loader, thread in list(_busy.items()):
        if thread != threading.get_ident() and loader.lock.acquire(timeout=_PATIENCE):
            loader.lock.release()


def _in_child() -> None:
    """What another thread has begun all the same is loaded anew."""
    for loader, thread in list(_busy.items()):
        if thread != threading.get_ident():
            del _busy[loader]
            loader.lock, loader.loading = threading.RLock(), False


class _Finder:
    """Finds modules as ever, and has those that may wait do so."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the import system asks."""
        if name not in SELDOM and not name.startswith(_OWN):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if (
            spec is not None
            and type(spec.loader) is SourceFileLoader
            and spec.submodule_search_locations is None
        ):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def lazily() -> None:
    """From now on; what is imported already stays as it is."""
    sys.meta_path.insert(0, _Finder)
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
    with _without("typing_extensions"):
        importlib.import_module("msgspec")


def settle() -> None:
    """Load all that still waits: for a program that runs on while criuctl is replaced by another
    version.
    """
    while waiting := [module for module in list(sys.modules.values()) if type(module) is _Later]:
        for module in waiting:
            _load(module)


@contextmanager
def _without(name: str) -> Iterator[None]:
    """As if the module were not installed, for who then takes from `typing` what is there just as
    well.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # which the import system takes for an absent one
    try:
        yield
    finally:
        del sys.modules[name]

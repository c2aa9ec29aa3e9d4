"""Modules that are loaded when they are first used, not when they are imported.

A command that dumps a small tree takes a quarter of a second. A third of that was Python loading
modules that it did not use: modules that only failures need, that only containers need, or that
click and msgspec import for other features. `lazily` makes the import system return such a module
empty; the first access to an attribute loads and runs it.

``from module import name`` accesses an attribute at once and gains nothing; an import of the module
itself (``from . import overlays``) gains. All of criuctl's own modules are loaded so, and of other
packages those in `SELDOM`, which have no side effects. Packages are loaded at once, because of the
modules inside them.

importlib has a LazyLoader. That of Python 3.11 loads at a second import as well, and shows
half-loaded modules to other threads.
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
"""Modules of the standard library and of others that a plain dump and restore import, mostly
indirectly, and do not use.
"""

_PATIENCE = 1.0  # seconds
_OWN = f"{__package__}."
# attributes that the import system itself reads
_PLAIN = frozenset({"__class__", "__dict__", "__spec__"})


class _Later(ModuleType):
    """A module that has not been accessed yet."""

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
    """The loader of a module whose loading is deferred."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        # held by the thread that loads the module; others wait until it is complete
        self.lock = threading.RLock()
        self.loading = False

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Later

    def run(self, module: ModuleType) -> None:
        """Run the module's code."""
        super().exec_module(module)


_busy: dict[_Loader, int] = {}  # loaders that run a module's code, by the thread that runs it


def _load(module: ModuleType) -> None:
    loader = module.__dict__["__loader__"]
    with loader.lock:
        # already loading in this thread (a circular import), or meanwhile loaded by another thread
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
    """Wait until other threads have finished loading, unless one waits for this thread: the child
    could not finish it.
    """
    for loader, thread in list(_busy.items()):
        if thread != threading.get_ident() and loader.lock.acquire(timeout=_PATIENCE):
            loader.lock.release()


def _in_child() -> None:
    """Reset modules that another thread was loading at the fork, so that the child loads them
    again.
    """
    for loader, thread in list(_busy.items()):
        if thread != threading.get_ident():
            del _busy[loader]
            loader.lock, loader.loading = threading.RLock(), False


class _Finder:
    """A finder that returns modules as usual, but defers the loading of those that allow it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, for the import system."""
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
    """Defer loading from now on; modules that are already imported stay as they are."""
    sys.meta_path.insert(0, _Finder)
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
    with _without("typing_extensions"):
        importlib.import_module("msgspec")


def settle() -> None:
    """Load all deferred modules, for a program that runs on while criuctl is replaced by another
    version.
    """
    while waiting := [module for module in list(sys.modules.values()) if type(module) is _Later]:
        for module in waiting:
            _load(module)


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Make imports of the module fail, so that its importers use `typing` instead, which has the
    same names.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # which the import system takes for an absent one
    try:
        yield
    finally:
        del sys.modules[name]

"""pycriu's generated message classes, each loaded when it is first needed.

Importing the package ``pycriu`` loads some sixty generated modules, a quarter of the time of a
small dump. The modules do not depend on the package, so they are imported one by one from its
folder: the RPC messages for every operation, those of images only for the images that are read.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import cache
from types import ModuleType
from typing import Any

from .. import preparation
from ..errors import PlatformError

# Kind of image (the name of its magic number) -> generated module and message.
_MESSAGES = {
    "CGROUP": ("cgroup_pb2", "cgroup_entry"),
    "CORE": ("core_pb2", "core_entry"),
    "FDINFO": ("fdinfo_pb2", "fdinfo_entry"),
    "FIFO_DATA": ("pipe_data_pb2", "pipe_data_entry"),
    "FILES": ("fdinfo_pb2", "file_entry"),
    "FILE_LOCKS": ("file_lock_pb2", "file_lock_entry"),
    "FS": ("fs_pb2", "fs_entry"),
    "GHOST_FILE": ("ghost_file_pb2", "ghost_file_entry"),
    "GHOST_CHUNK": ("ghost_file_pb2", "ghost_chunk_entry"),
    "IDS": ("core_pb2", "task_kobj_ids_entry"),
    "INVENTORY": ("inventory_pb2", "inventory_entry"),
    "IPCNS_SHM": ("ipc_shm_pb2", "ipc_shm_entry"),
    "MEMFD_INODE": ("memfd_pb2", "memfd_inode_entry"),
    "MM": ("mm_pb2", "mm_entry"),
    "MNTS": ("mnt_pb2", "mnt_entry"),
    "PAGEMAP": ("pagemap_pb2", "pagemap_entry"),
    "PAGEMAP_HEAD": ("pagemap_pb2", "pagemap_head"),
    "PSTREE": ("pstree_pb2", "pstree_entry"),
    "REMAP_FPATH": ("remap_file_path_pb2", "remap_file_path_entry"),
    "SK_QUEUES": ("sk_packet_pb2", "sk_packet_entry"),
    "STATS": ("stats_pb2", "stats_entry"),
    "TTY_INFO": ("tty_pb2", "tty_info_entry"),
    "USERNS": ("userns_pb2", "userns_entry"),
}


@cache
def folder() -> str:
    """Return the package's folder, without importing the package; raise `PlatformError` if it is
    not installed.
    """
    found = importlib.util.find_spec("pycriu")
    if found is None or not found.submodule_search_locations:
        raise PlatformError(
            f"pycriu, CRIU's Python package, is not importable for {sys.executable}",
            hint=preparation.advice(),
        )
    return found.submodule_search_locations[0]


@cache
def _module(name: str, *below: str) -> ModuleType:
    place = os.path.join(folder(), *below)
    # The generated modules import each other by their bare names, as pycriu itself makes possible.
    if place not in sys.path:
        sys.path.append(place)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PlatformError(
            f"pycriu cannot be imported: {error}",
            hint="`criuctl doctor --fix` installs that of its CRIU.",
        ) from error


def rpc() -> Any:
    """Return the messages of CRIU's RPC."""
    return _module("rpc_pb2")


def message(kind: str) -> Any:
    """Return the message class of an image's entries."""
    module, name = _MESSAGES[kind]
    return getattr(_module(module, "images"), name)


def magic(name: str) -> int:
    """Return a magic number by its name."""
    number: int = _module("magic", "images").by_name[name]
    return number


def load() -> None:
    """Load all messages, for a process that forks before it needs them.  `PlatformError`."""
    rpc()
    _module("magic", "images")
    for module, _ in _MESSAGES.values():
        _module(module, "images")

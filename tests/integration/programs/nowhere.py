"""A working directory that is deleted, and an open directory that is deleted."""

from __future__ import annotations

import os

from animal import Check, path, serve

os.mkdir(path("gone"))
os.mkdir(path("also-gone"))
folder = os.open(path("also-gone"), os.O_RDONLY | os.O_DIRECTORY)
os.chdir(path("gone"))
os.rmdir(path("gone"))
os.rmdir(path("also-gone"))


def check(found: Check) -> None:
    found.equal("cwd", os.readlink("/proc/self/cwd"), path("gone") + " (deleted)")
    found.equal("folder", (os.fstat(folder).st_nlink, os.listdir(folder)), (0, []))


serve(check)

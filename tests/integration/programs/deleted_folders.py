"""Folders and files in them that were deleted while they are open. Argument: which."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import sys

from animal import FOLDER, Check, path, serve

WHICH = sys.argv[2]
folders: dict[int, str] = {}  # descriptor -> its name
files: dict[int, bytes] = {}  # descriptor -> contents
servers: list[socket.socket] = []
pipes: list[int] = []
mapped: list[mmap.mmap] = []


def folder(name: str) -> None:
    """Make a folder, if need be, and open it."""
    os.makedirs(path(name), exist_ok=True)
    folders[os.open(path(name), os.O_RDONLY | os.O_DIRECTORY)] = name


def file(name: str) -> None:
    """Make a file and open it."""
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    fd = os.open(path(name), os.O_RDWR | os.O_CREAT, 0o640)
    files[fd] = name.encode() + b" " + b"x" * 20_000
    os.write(fd, files[fd])


match WHICH:
    case "first":
        folder("q")
        file("q/x")
    case "last":
        file("q/x")
        folder("q")
    case "several":
        folder("q")
        for name in ("x", "y", "z"):
            file(f"q/{name}")
        os.chmod(path("q"), 0o710)
        os.mkdir(path("p"))
        file("p/x")
        folder("p")
        shutil.rmtree(path("p"))
    case "nested":
        folder("q")
        file("q/x")
        folder("q/a")
        folder("q/a/b")
        file("q/a/b/x")
        folder("q/b")
    case "inward":
        folder("q/a/b")
        folder("q/a")
        file("q/a/b/x")
        folder("q")
    case "gap":  # the folders between are not open
        folder("q/a/b")
        file("q/a/b/c/x")
    case "cwd":
        os.mkdir(path("q"))
        os.chdir(path("q"))
        file("q/x")
    case "fifo":
        folder("q")
        os.mkfifo(path("q/f"))
        pipes.append(os.open(path("q/f"), os.O_RDWR))
    case "socket":
        folder("q")
        servers.append(socket.socket(socket.AF_UNIX))
        os.chdir(path("q"))
        servers[0].bind("s")
        servers[0].listen()
        os.chdir(FOLDER)
    case "again" | "again-full":
        folder("q")
        file("q/x")
        shutil.rmtree(path("q"))
        os.mkdir(path("q"))
        if WHICH == "again-full":
            with open(path("q/x"), "w") as new:
                new.write("another one")
    case "twice":
        folder("q")
        file("q/x")
        shutil.rmtree(path("q"))
        folder("q")
        file("q/x")
        folder("q")
    case "mapped":
        folder("q")
        file("q/x")
        mapped.append(mmap.mmap(max(files), 20_000))
        mapped.append(mmap.mmap(max(files), 20_000, mmap.MAP_PRIVATE))
        mapped[1][:4] = b"mine"
    case "linked":  # another name of the file lives on
        folder("q")
        file("q/x")
        os.link(path("q/x"), path("y"))
    case "child":  # who has the file is another one than who has the folder
        folder("q")
        if os.fork() == 0:
            folder("q")
            file("q/x")
            with open(path("built"), "w"):
                pass
            while True:
                os.read(os.pipe()[0], 1)
        while not os.path.exists(path("built")):
            pass
        os.unlink(path("built"))
    case "outside":
        folder(sys.argv[3])
        file(f"{sys.argv[3]}/x")
        shutil.rmtree(sys.argv[3])
        os.mkdir(path("q"))
if not WHICH.startswith("again"):
    shutil.rmtree(path("q"))
inodes = {fd: os.fstat(fd).st_ino for fd in folders}


def check(found: Check) -> None:
    for fd, name in folders.items():
        found.equal(f"links of folder {name}", os.fstat(fd).st_nlink, 0)
        found.equal(f"what is in folder {name}", os.listdir(fd), [])
    for fd, content in files.items():
        found.equal("links", os.fstat(fd).st_nlink, 1 if WHICH == "linked" else 0)
        found.equal("contents", os.pread(fd, 1 << 20, 0), content)
        found.equal("end", os.lseek(fd, 0, os.SEEK_CUR), len(content))
    groups: dict[int, set[int]] = {}
    for fd, inode in inodes.items():
        groups.setdefault(inode, set()).add(os.fstat(fd).st_ino)
    found.true(
        "descriptors of one folder are of one folder",
        all(len(group) == 1 for group in groups.values()),
    )
    found.equal("different folders", len(set().union(*groups.values())), len(groups))
    if WHICH == "cwd":
        found.equal("working folder", (os.stat(".").st_nlink, os.listdir(".")), (0, []))
    if pipes:
        (fd,) = pipes
        os.write(fd, b"once more")
        found.equal("pipe", os.read(fd, 20), b"once more")
    if mapped:
        fd = next(iter(files))
        found.equal("private", mapped[1][:6], b"mine" + files[fd][4:6])
        mapped[0][100:101] = b"+"
        found.equal("shared", os.pread(fd, 1, 100), b"+")
        mapped[0][100:101] = files[fd][100:101]


serve(check)

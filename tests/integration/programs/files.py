"""Files: offsets, appending, shared offsets, deleted, renamed, directories, devices. Argument: MiB
of the deleted file.
"""

from __future__ import annotations

import hashlib
import os
import sys

from animal import Check, path, pattern, serve

MIB = int(sys.argv[2]) if len(sys.argv) > 2 else 5
content = pattern(1000, 6)
with open(path("book"), "wb") as file:
    file.write(content)
reader = open(path("book"), "rb")  # noqa: SIM115 - open on purpose
reader.seek(400)
os.lseek(reader.fileno(), 400, os.SEEK_SET)
log = os.open(path("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, b"one\n")
unflushed = open(path("unflushed"), "w")  # noqa: SIM115 - open on purpose
unflushed.write("said once, not written yet\n")

big = pattern(1 << 20, 7)
deleted = os.open(path("deleted"), os.O_RDWR | os.O_CREAT, 0o640)
for _ in range(MIB):
    os.write(deleted, big)
os.lseek(deleted, 777, os.SEEK_SET)
deleted_again = os.open(path("deleted"), os.O_RDONLY)
os.unlink(path("deleted"))
sparse = os.open(path("sparse"), os.O_RDWR | os.O_CREAT)
os.pwrite(sparse, b"end", 64 << 20)
os.unlink(path("sparse"))

linked = os.open(path("linked"), os.O_RDWR | os.O_CREAT)
os.write(linked, b"I have another name")
os.link(path("linked"), path("other-name"))
os.unlink(path("linked"))
twice = [os.open(path("twice"), os.O_RDWR | os.O_CREAT), os.open(path("twice"), os.O_RDWR)]
os.link(path("twice"), path("twice-named"))
os.unlink(path("twice"))
replaced = os.open(path("replaced"), os.O_RDWR | os.O_CREAT)
os.write(replaced, b"old")
with open(path("new"), "wb") as file:
    file.write(b"new")
os.rename(path("new"), path("replaced"))

renamed = os.open(path("before"), os.O_RDWR | os.O_CREAT)
os.write(renamed, b"moved")
os.rename(path("before"), path("after"))
folder = os.open(path("."), os.O_RDONLY | os.O_DIRECTORY)
os.mkdir(path("empty"))
place = os.open(path("empty"), os.O_PATH)
null, zero, random = (os.open(f"/dev/{name}", os.O_RDWR) for name in ("null", "zero", "urandom"))
proc = os.open("/proc/self/status", os.O_RDONLY)
os.symlink("book", path("link"))
through_link = os.open(path("link"), os.O_RDONLY)
number = os.dup2(reader.fileno(), 500)

go_read, go_write = os.pipe()
answer_read, answer_write = os.pipe()
if os.fork() == 0:
    while os.read(go_read, 1):
        os.write(answer_write, os.read(reader.fileno(), 10))
    os._exit(0)
position = 400
lines = 1


def check(found: Check) -> None:
    global position, lines
    found.equal("shared offset, mine", os.read(number, 10), content[position : position + 10])
    os.write(go_write, b"?")
    found.equal(
        "shared offset, the child's",
        os.read(answer_read, 10),
        content[position + 10 : position + 20],
    )
    position += 20
    lines += 1
    os.write(log, b"line %d\n" % lines)
    with open(path("log"), "rb") as file:
        found.equal("lines of the log", len(file.read().splitlines()), lines)
    found.equal("deleted file's offset", os.lseek(deleted, 0, os.SEEK_CUR), 777)
    data = hashlib.sha256()
    for block in range(MIB):
        data.update(os.pread(deleted_again, 1 << 20, block << 20))
    found.equal("deleted file", data.hexdigest(), hashlib.sha256(big * MIB).hexdigest())
    os.pwrite(deleted, b"#", 0)
    found.equal("both descriptors of the deleted file", os.pread(deleted_again, 1, 0), b"#")
    os.pwrite(deleted, big[:1], 0)
    found.equal("deleted file's mode", oct(os.fstat(deleted).st_mode & 0o777), oct(0o640))
    found.equal("links of the deleted file", os.fstat(deleted).st_nlink, 0)
    found.equal(
        "sparse deleted file",
        (os.pread(sparse, 3, 64 << 20), os.fstat(sparse).st_blocks < 64),
        (b"end", True),
    )
    found.equal("file with another name", os.pread(linked, 64, 0), b"I have another name")
    with open(path("other-name"), "rb") as file:
        found.equal("its other name", file.read(), b"I have another name")
        found.true("one file under both", os.path.sameopenfile(linked, file.fileno()))
    found.true("its first name is gone", not os.path.exists(path("linked")))
    os.pwrite(twice[0], b"by one", 0)
    found.equal("opened twice, with another name", os.pread(twice[1], 9, 0), b"by one")
    found.equal("replaced file", os.pread(replaced, 64, 0), b"old")
    found.equal("renamed file", os.readlink(f"/proc/self/fd/{renamed}"), path("after"))
    found.true("folder", "book" in os.listdir(folder))
    found.equal("a place", os.readlink(f"/proc/self/fd/{place}"), path("empty"))
    found.equal(
        "devices",
        (os.read(zero, 4), os.write(null, b"x"), len(os.read(random, 8))),
        (bytes(4), 1, 8),
    )
    found.true("proc", os.pread(proc, 64, 0).startswith(b"Name:"))
    found.equal("through a link", os.pread(through_link, 10, 0), content[:10])
    unflushed.flush()
    with open(path("unflushed")) as file:
        found.equal("unflushed line", file.read(), "said once, not written yet\n")


serve(check)

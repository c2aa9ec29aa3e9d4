"""Terminals of the same number, of two mounts of /dev/pts."""

from __future__ import annotations

from pathlib import Path

from support.obstacles import running

from criuctl.proc.descriptors import descriptors
from criuctl.proc.tree import read_tree
from criuctl.proc.tty import terminals

TWO = """
m, theirs = outside(os.openpty)
os.close(m)
fcntl.ioctl(theirs, 0x540E, 0)
wanted = os.fstat(theirs).st_rdev
assert libc.unshare(0x20000) == 0
libc.mount(b"none", b"/", None, 0x44000, None)
assert libc.mount(b"none", b"/dev/pts", b"devpts", 0, b"newinstance,ptmxmode=0666") == 0
kept = []
while True:
    m = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(m, 0x40045431, struct.pack("i", 0))
    number = struct.unpack("i", fcntl.ioctl(m, 0x80045430, bytes(4)))[0]
    s = os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY)
    if os.fstat(s).st_rdev == wanted:
        break
    kept += [m, s]
for fd in kept:
    os.close(fd)
def lead():
    os.setsid()
    fcntl.ioctl(s, 0x540E, 0)
    os.close(theirs)
child(lead)
os.close(s)
"""


def test_terminals_of_the_same_number(tmp_path: Path) -> None:
    with running(TWO, tmp_path) as program:
        tree = read_tree(program.pid)
        found = terminals(tree, {p.pid: descriptors(p.pid) for p in tree})
        (inner,) = [t for t in found if t.master_inside]
        (outer,) = [t for t in found if not t.master_inside]
    assert inner.rdev == outer.rdev and inner.dev != outer.dev
    assert outer.session_leader == program.pid
    assert inner.session_leader == tree[1].pid
    assert outer.controls == (program.pid,) and inner.controls == (tree[1].pid,)

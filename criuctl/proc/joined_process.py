"""Start a program as the child of another process, which knows nothing of it.

Only a process itself can have children.  A program that is to belong to a tree, with its
namespaces, control groups and its place below the root, is therefore forked by a call that is run
inside that process (`inject`), and executes the program by calls inside the fork.  The process must
reap children that it does not know: an init does.

A separate program: ``python joined_process.py CHANNEL PARENT``, run by a session's holder.  CHANNEL
is a socket: it gets ``{argv, env, name, files}`` as JSON and the end of the stream, perhaps with a
descriptor that fills the first file, and answers ``{pid, start_time}`` with the descriptors of the
program's other files, or ``{error}``.  The program is `commandchild`, which stops itself until
then.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from criuctl.proc import inject
from criuctl.proc.tree import ProcessIdentity, children

_MMAP, _FORK, _EXECVE = 9, 57, 59
_PROT_READ_WRITE, _PRIVATE_ANONYMOUS = 3, 0x22
_STOPS = 20.0  # seconds for the program to come to its stop
_TURN, _LOOK = 10.0, 0.005  # seconds to wait for another program's turn; between two tries
_PAGE = 4096
_COPY = 1 << 20


def start(parent: int, argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Execute a program in a new child of `parent`, and return its PID; `OSError`."""
    with _alone_in(parent):
        before = set(children(parent))
        with inject.calling(parent) as run:
            result = run(_FORK)
        if result < 0:
            raise OSError(-result, f"PID {parent} cannot fork: {os.strerror(-result)}")
        (child,) = set(children(parent)) - before
        _execute(child, argv, env)
    return child


@contextmanager
def _alone_in(parent: int) -> Iterator[None]:
    """Stop `parent`; wait while another of these programs does, which starts another child."""
    deadline = time.monotonic() + _TURN
    with ExitStack() as stopped:
        while True:
            try:
                stopped.enter_context(inject.stopped(parent, forks=True))
                break
            except PermissionError:  # a process has one tracer
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK)
        yield


def _execute(child: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Execute a program in a fork that is traced and has not run yet, and let it go."""
    inject.wait_stop(child)
    variables = [f"{name}={value}" for name, value in env.items()]
    try:
        with inject.calling(child) as run:
            block = _block(argv[0], argv, variables, 0)
            address = run(_MMAP, 0, len(block), _PROT_READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
            if address < 0:
                raise OSError(-address, os.strerror(-address))
        inject.write_memory(child, address, _block(argv[0], argv, variables, address))
        arguments = address + 8 * (len(argv) + 1)
        path = arguments + 8 * (len(variables) + 1)
        result = inject.last_call(child, _EXECVE, path, address, arguments)
        if result < 0:
            raise OSError(-result, f"{argv[0]}: {os.strerror(-result)}")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    inject.let_go(child)


def _block(path: str, argv: Sequence[str], env: Sequence[str], address: int) -> bytes:
    """Return the memory that execve(2) reads: two arrays of pointers, the path, all texts."""
    texts = [os.fsencode(text) + b"\0" for text in (*argv, *env)]
    at = address + 8 * (len(argv) + 1 + len(env) + 1)
    name = os.fsencode(path) + b"\0"
    places, behind = [], at + len(name)
    for text in texts:
        places.append(behind)
        behind += len(text)
    pointers = [*places[: len(argv)], 0, *places[len(argv) :], 0]
    block = struct.pack(f"={len(pointers)}Q", *pointers) + name + b"".join(texts)
    return block.ljust(-(-len(block) // _PAGE) * _PAGE, b"\0")


def _await_stop(identity: ProcessIdentity) -> None:
    """Wait until the program has stopped itself; `OSError` if it does not."""
    deadline = time.monotonic() + _STOPS
    while (state := identity.state()) != "T":
        if state in (None, "Z", "X") or time.monotonic() > deadline:
            raise OSError(f"the program did not begin (state {state})")
        time.sleep(0.002)


def _fill(source: int, target: int) -> None:
    offset = 0
    while piece := os.pread(source, _COPY, offset):
        offset += len(piece)
        while piece:
            piece = piece[os.write(target, piece) :]


def _serve(channel: socket.socket, parent: int) -> None:
    received, fds = b"", list[int]()
    while True:
        piece, more, _flags, _address = socket.recv_fds(channel, 1 << 16, 4)
        fds += more
        if not piece:
            break
        received += piece
    order = json.loads(received)
    child = start(parent, order["argv"], order["env"])
    identity = ProcessIdentity.of(child)
    try:
        _await_stop(identity)
        if fds:
            target = os.open(f"/proc/{child}/fd/0", os.O_WRONLY | os.O_CLOEXEC)
            _fill(fds[0], target)
        files = [
            os.open(f"/proc/{child}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            for number in order["files"]
        ]
        answer = json.dumps({"pid": child, "start_time": identity.start_time}).encode()
        socket.send_fds(channel, [answer], files)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    os.kill(child, signal.SIGCONT)


def main() -> int:
    """Run the program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        _serve(channel, int(sys.argv[2]))
    except Exception as error:
        channel.sendall(json.dumps({"error": str(error) or type(error).__name__}).encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A client with many habits: ``caller.py FOLDER WAY KIND ADDRESS [COUNT]``; holds COUNT connections
and says what they see.

KIND is tcp, udp, unix, seqpacket or unix-dgram.  WAY is how it waits for answers: blocking (a
thread for each connection sits in recv), select, epoll, shared (the descriptor, a duplicate of it
and a child's copy take turns), late (reads only when asked to, until the end) or accept (it is the
server at ADDRESS: reads its last client until the end, then takes the next).  Each question is one
line, and a right answer is the same line.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys
import threading
import time

from animal import Check, serve

way, kind, address = sys.argv[2:5]
count = int(sys.argv[5]) if len(sys.argv) > 5 else 1
KINDS = {
    "unix": socket.SOCK_STREAM,
    "seqpacket": socket.SOCK_SEQPACKET,
    "unix-dgram": socket.SOCK_DGRAM,
}


def connect(address: str) -> socket.socket:
    """One connection, with an option and a flag of its own that must survive."""
    if kind in KINDS:
        made = socket.socket(socket.AF_UNIX, KINDS[kind])
        if kind == "unix-dgram":
            made.bind("")  # a name, so that it can be answered
        made.connect(address)
        return made
    host, port = address.rsplit(":", 1)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
    if kind == "tcp":
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 34567)
    made.connect((host.strip("[]"), int(port)))
    return made


addresses = address.split(",")  # taken in turn
if way == "accept":
    listener = socket.socket(socket.AF_UNIX, KINDS[kind])
    listener.bind(address)
    listener.listen()
    count = 0
clients: list[socket.socket] = []
connections = [connect(addresses[n % len(addresses)]) for n in range(count)]
seen: list[list[str]] = [[] for _ in connections]
news = threading.Condition()


def note(number: int, what: str) -> None:
    """Remember what happened on a connection."""
    with news:
        seen[number].append(what)
        news.notify_all()


def read(number: int) -> bool:
    """Read once; whether there may be more."""
    try:
        data = connections[number].recv(4096)
    except OSError as error:
        note(number, type(error).__name__)
        return isinstance(error, BlockingIOError)
    note(number, data.decode() if data else "eof")
    return bool(data)


def blocking(number: int) -> None:
    """Sit in recv."""
    while read(number):
        pass


def selecting() -> None:
    """Wait for all of them with select."""
    left = set(range(count))
    while left:
        ready = select.select([connections[n] for n in left], [], [])[0]
        for number in list(left):
            if connections[number] in ready and not read(number):
                left.discard(number)


def polling(poller: select.epoll) -> None:
    """Wait for all of them with epoll: events are noted as well."""
    numbers = {c.fileno(): n for n, c in enumerate(connections)}
    while numbers:
        for fd, events in poller.poll():
            if events & select.EPOLLHUP:
                note(numbers[fd], "hup")
            if not read(numbers[fd]) or events & select.EPOLLHUP:
                poller.unregister(fd)
                del numbers[fd]


child: tuple[int, int] | None = None
if way == "shared":
    second = socket.socket(fileno=os.dup(connections[0].fileno()))
    asked, asking = os.pipe()
    replied, replying = os.pipe()
    if os.fork() == 0:
        while os.read(asked, 1):
            connections[0].sendall(b"child\n")
            os.write(replying, connections[0].recv(64))
    child = asking, replied
elif way == "blocking":
    for each in range(count):
        threading.Thread(target=blocking, args=(each,), daemon=True).start()
elif way == "select":
    threading.Thread(target=selecting, daemon=True).start()
elif way == "epoll":
    epoll = select.epoll()
    for held in connections:
        held.setblocking(False)
        epoll.register(held, select.EPOLLIN)
    threading.Thread(target=polling, args=(epoll,), daemon=True).start()

asked_times = 0


def ask(number: int) -> None:
    """Send a line; how that goes is noted."""
    try:
        connections[number].send(b"question %d\n" % asked_times)
    except OSError as error:
        note(number, f"send {type(error).__name__}")


def inside() -> object:
    """What criuctl tells a restored process, by the module that is made for it."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "inside", os.path.join(os.path.dirname(__file__), "../../../criuctl/inside.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.report()


def late() -> str:
    """What the one connection has to say until its end."""
    said = b""
    for one in connections or clients[-1:]:
        while data := one.recv(4096):
            said += data
    if way == "accept":
        clients.append(listener.accept()[0])
    return said.decode()


def check(found: Check) -> None:
    """Ask on every connection and wait for what comes; EOF and errors are answers too."""
    global asked_times
    asked_times += 1
    began = time.monotonic()
    if "CRIUCTL_RUN_DIR" in os.environ:
        found.facts |= {"inside": inside()}
    if child is not None:
        answers = []
        for one in (connections[0], second):
            one.sendall(b"parent\n")
            answers.append(one.recv(64).decode())
        os.write(child[0], b"?")
        answers.append(os.read(child[1], 64).decode())
        found.facts |= {"answers": answers}
        return
    if way in ("late", "accept"):
        found.facts |= {"read": late()}
        return
    for number in range(count):
        ask(number)
    ends = ("eof", "hup")
    answer = f"question {asked_times}\n"

    def tells(event: str) -> bool:
        """Whether nothing more is to come: who cannot send because it is hung up is still to read
        of it.
        """
        return (
            answer in event
            or event in ends
            or (event.endswith("Error") and event != "send BrokenPipeError")
        )

    def settled() -> bool:
        return all(any(map(tells, events)) for events in seen)

    with news:
        news.wait_for(settled, 50)
        events = [list(each) for each in seen]
    answered = sum(any(answer in s for s in each) for each in events)
    flags = {fcntl.fcntl(c, fcntl.F_GETFL) & os.O_NONBLOCK for c in connections}
    found.facts |= {
        "answered": answered,
        "events": events[:3],
        "seconds": time.monotonic() - began,
        "nonblocking": sorted(flags),
    }
    if kind == "tcp":
        timeouts = {c.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for c in connections}
        delays = {c.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for c in connections}
        found.facts |= {"user_timeouts": sorted(timeouts), "nodelay": sorted(delays)}


serve(check)

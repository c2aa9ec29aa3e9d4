"""The program that the demonstration moves. It has a counter, a terminal and a listening socket,
all of them in memory only.

`live.py PORT` counts twenty times a second, repeats each line that is typed, and answers every
connection to PORT with one line: the random id of this run, its count, how many lines it has read,
and the last of them.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from uuid import uuid4

life = uuid4().hex[:8]  # differs if the program is ever started again
count = 0
lines: list[str] = []


def count_on() -> None:
    """Count for ever."""
    global count
    while True:
        count += 1
        time.sleep(0.05)


def answer(server: socket.socket) -> None:
    """Answer the clients, one after the other."""
    while True:
        client, _ = server.accept()
        with client:
            last = lines[-1] if lines else ""
            try:
                client.sendall(
                    f"life={life} count={count} lines={len(lines)} last={last}\n".encode()
                )
            except OSError:
                pass  # the client has disconnected


def main() -> None:
    """Listen, count, and read what is typed."""
    server = socket.create_server(("", int(sys.argv[1])), backlog=64)
    threading.Thread(target=answer, args=(server,), daemon=True).start()
    threading.Thread(target=count_on, daemon=True).start()
    print(f"life {life}: listening on port {sys.argv[1]}", flush=True)
    for line in sys.stdin:
        lines.append(line.strip())
        print(f"line {len(lines)}: {lines[-1]}", flush=True)


if __name__ == "__main__":
    main()

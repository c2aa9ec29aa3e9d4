"""Another user of the host, for tests that attack."""

from __future__ import annotations

import os
from collections.abc import Callable

NEIGHBOUR = 65534


def as_neighbour(do: Callable[[], object]) -> str:
    """What `do` returns or raises in a process of another user, as text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
            os.setresuid(NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
            said = f"returned {do()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode(errors="replace")[:60_000])
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading, "rb") as file:
        return file.read().decode(errors="replace")

"""One of several processes that race for names: ``racer.py URL ID ROUNDS``.

Says ``ready``, waits for a line, then tries to create ``race/<n>`` for each round with contents of
its own, and prints the rounds it won.
"""

from __future__ import annotations

import sys

from criuctl.config import Config
from criuctl.errors import ObjectExists
from criuctl.store import open_store


def main(url: str, identity: str, rounds: int) -> None:
    """Race."""
    with open_store(url, Config()) as store:
        store.stat("ready")  # connected before the start
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(rounds):
            try:
                store.put(f"race/{number:03}", identity.encode(), if_absent=True)
            except ObjectExists:
                continue
            print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""Watch all hosts from a third one: does the program of the demonstration run exactly once?

observer.py ask ADDRESS PORT                 ask once; exit 1 without an answer
observer.py watch LOG PORT NAME=ADDRESS...   ask all hosts ten times a second until it is ended, and
                                             log the answers
observer.py judge LOG NAME...                check that the answers came from these hosts one after
                                             another, from one host at a time

Two copies would answer in turns: there would be more changes than moves, or a count that goes back,
or another life.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

PATIENCE = 2.0  # seconds for an answer; a frozen program accepts and says nothing


def ask(address: str, port: int) -> str | None:
    """Return its line, or None."""
    try:
        with socket.create_connection((address, port), PATIENCE) as connection:
            connection.settimeout(PATIENCE)
            with connection.makefile(encoding="utf-8") as answer:
                line = answer.readline()
    except OSError:
        return None
    return line.rstrip("\n") if line.endswith("\n") else None


def watch(log: str, port: int, hosts: dict[str, str]) -> None:
    """Ask each host in a separate thread, so that a silent host does not delay the others."""
    lock = threading.Lock()
    with open(log, "w", encoding="utf-8") as file:

        def one(name: str) -> None:
            while True:
                line = ask(hosts[name], port)
                if line is not None:
                    with lock:
                        print(f"{time.monotonic():.3f}", name, line, file=file, flush=True)
                time.sleep(0.1)

        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def judge(log: str, expected: list[str]) -> int:
    """Print what was seen; return 0 if it is as expected."""
    with open(log, encoding="utf-8") as file:
        answers = [line.split() for line in file]
    stays: list[tuple[str, int]] = []
    faults, silences = [], []
    lives = {answer[2] for answer in answers}
    if len(lives) > 1:
        faults.append(f"it had several lives: {' '.join(sorted(lives))}")
    last_time, last_count = 0.0, 0
    for when, name, _, counted, *_ in answers:
        count = int(counted.removeprefix("count="))
        if count < last_count:
            faults.append(f"the count went back from {last_count} to {count}, on {name}")
        if not stays or stays[-1][0] != name:
            if stays:
                silences.append(f"{float(when) - last_time:.1f} s")
            stays.append((name, 0))
        stays[-1] = (name, stays[-1][1] + 1)
        last_time, last_count = float(when), count
    if [name for name, _ in stays] != expected:
        faults.append(f"it should have lived on {', '.join(expected)}, in this order")
    print(
        f"{len(answers)} answers, in this order:",
        ", ".join(f"{number} of {name}" for name, number in stays),
    )
    print(
        "silence between the last answer of a host and the first of the next: "
        f"{', '.join(silences) or 'none'}"
    )
    for fault in faults:
        print(f"WRONG: {fault}")
    return 1 if faults else 0


def main() -> int:
    """Run the command that the first word names."""
    match sys.argv[1:]:
        case ["ask", address, port]:
            line = ask(address, int(port))
            if line is not None:
                print(line)
            return 0 if line is not None else 1
        case ["watch", log, port, *hosts]:
            watch(log, int(port), dict(host.split("=", 1) for host in hosts))
            return 0
        case ["judge", log, *expected]:
            return judge(log, expected)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

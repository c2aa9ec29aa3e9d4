#!/usr/bin/env python3
"""A tree search: twenty branches from one live Python process; the best one is kept.

The process has done work that takes long, and holds it in memory. Each branch goes on from there
with a decision of its own, all of them at once; nothing is computed again, and memory that no
branch writes to is there once.

    python3 tree_search.py [BRANCHES]
"""

import sys

from criuctl import Session

PROGRAM = """
import random, sys
board = bytearray(random.Random(1).randbytes(64 << 20))  # what took long
print("ready", flush=True)
for line in sys.stdin:
    choice = random.Random(int(line))
    for _ in range(2000):  # this branch's own moves
        board[choice.randrange(1 << 16)] = choice.randrange(256)
    print("score", sum(board[: 1 << 16]), flush=True)
"""


def score(branch: Session) -> int:
    """Return what the branch has reached."""
    found = branch.wait_match(r"score \d+", timeout=120)
    return int(found.text.split()[1])


def main() -> None:
    """Grow the branches, keep the best one, end the others."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    root = Session.run([sys.executable, "-c", PROGRAM], name="search")
    root.wait_match("ready", timeout=120)
    branches = root.fork(count, ttl=3600)
    for number, branch in enumerate(branches):
        branch.send(f"{number}\n")
    scores = {branch.name: score(branch) for branch in branches}
    best = max(scores, key=scores.__getitem__)
    for branch in branches:
        if branch.name != best:
            branch.kill(0)
            branch.forget()
    root.kill(0)
    print(f"{best} is kept, with {scores[best]} of {sorted(scores.values())}")


if __name__ == "__main__":
    main()

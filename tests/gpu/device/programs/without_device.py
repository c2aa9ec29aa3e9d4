"""A deterministic program without a device; numbers from a generator of its own are its state."""

from __future__ import annotations

import random

from steplog import Steps

if __name__ == "__main__":
    numbers = random.Random(7)
    held = bytearray(numbers.randbytes(1 << 20))
    steps = Steps()
    for number in steps:
        held[number % len(held)] = numbers.randrange(256)
        steps.log(numbers.random(), bytes(held))

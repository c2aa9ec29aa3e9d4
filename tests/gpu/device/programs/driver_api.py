"""Device memory by the driver's API alone: ``driver_api.py FOLDER [managed]``.

With ``managed`` it is managed memory, which the driver cannot checkpoint.
"""

from __future__ import annotations

import random
import sys

import cuda_api
from steplog import Steps, note

MIB = 1 << 20


def main() -> None:
    """Change one buffer at random places; the hash of all of it is logged."""
    cuda_api.start()
    numbers = random.Random(7)
    managed = len(sys.argv) > 2 and sys.argv[2] == "managed"
    buffer = cuda_api.Buffer(4 * MIB, managed=managed)
    buffer.write(numbers.randbytes(4 * MIB))
    unchanged = cuda_api.Buffer(60 * MIB)
    unchanged.write(numbers.randbytes(60 * MIB))
    note(device_bytes=64 * MIB)
    steps = Steps()
    for number in steps:
        buffer.write(numbers.randbytes(256), numbers.randrange(4 * MIB - 256))
        steps.log(numbers.random(), buffer.read(), unchanged.read() if number % 50 == 0 else b"")


if __name__ == "__main__":
    main()

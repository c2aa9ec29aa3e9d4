"""A device that is open and not used: ``open_device.py FOLDER nodes|init``.

``nodes`` opens the device files alone, ``init`` starts the driver (cuInit) and makes no context.
"""

from __future__ import annotations

import ctypes
import os
import sys

from steplog import Steps


def main() -> None:
    """Count with the device open."""
    if sys.argv[2] == "init":
        answer = ctypes.CDLL("libcuda.so.1").cuInit(0)
        if answer:
            raise SystemExit(f"cuInit answers {answer}")
    else:
        for node in ("/dev/nvidiactl", "/dev/nvidia0"):
            os.open(node, os.O_RDWR | os.O_CLOEXEC)
    steps = Steps()
    for number in steps:
        steps.log(number, b"%d" % number)


if __name__ == "__main__":
    main()

"""Waits in poll(2) for ever, until a handler interrupts it: ``interruptible.py FOLDER`` writes each
return to ``returns``.
"""

from __future__ import annotations

import ctypes
import os
import signal

from animal import libc, path, ready

returns = os.open(path("returns"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
signal.signal(signal.SIGUSR2, lambda number, frame: None)
ready()
while True:
    result = libc.poll(None, 0, -1)
    os.write(returns, b"%d %d\n" % (result, ctypes.get_errno()))

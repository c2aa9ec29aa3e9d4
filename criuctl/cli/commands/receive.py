"""``criuctl receive``: started on this host by `criuctl migrate` on another one."""

from __future__ import annotations

import os
import signal

from ...errors import UsageError
from ..app import App, pass_app
from ..pages import page


@page(
    examples=[
        (
            "Whether a host can be reached for a migration (it waits for the other criuctl; ^C "
            "ends it):",
            "ssh root@gamma criuctl receive",
        )
    ],
    exits=[3, 7, 8, 9, 13],
    see_also=["migrate"],
)
@pass_app
def receive(app: App) -> int:
    """Receive sessions from another host, which speaks over standard input and output. criuctl
    migrate starts it over ssh; it has no use by hand.

    When the link breaks while a restored session is held, it waits five minutes for the other host
    to come again.
    """
    from ...ops.receive import receive as serve

    if os.isatty(0):
        raise UsageError(
            "standard input is a terminal, not another host",
            hint="`criuctl migrate` on the other host starts it.",
        )
    # the login ends with the link; a held session stays
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reading, writing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # nothing else may write into the protocol, or hold the login open
        os.dup2(null, stream)
    with app.reporting() as reporter:
        serve(app.config, reading, writing, reporter=reporter)
    os.close(null)
    return 0

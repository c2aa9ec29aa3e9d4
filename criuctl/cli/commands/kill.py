"""``criuctl kill``."""

from __future__ import annotations

from ...session import protocol
from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument, timeout_option
from ..streams import tell
from ..text import plural, printable


@page(
    examples=[
        ("End a session; its processes may clean up for five seconds:", "criuctl kill build"),
        ("At once:", "criuctl kill build --timeout 0"),
    ],
    exits=[3, 9, 10, 12],
    see_also=["signal", "halt", "forget", "ls"],
)
@name_argument
@timeout_option(
    "Seconds between SIGTERM and SIGKILL; 0: SIGKILL at once. An hour at most.",
    5.0,
    protocol.MAX_GRACE,
)
@pass_app
def kill(app: App, name: str, timeout: float) -> int:
    """End every process of a session, daemons included: SIGTERM, after the time-out SIGKILL, until
    no process is left. Exit status 0 means that this was verified.

    A paused session is resumed to receive the signal. A checkpointed session is given up: its
    checkpoints stay in the store until `prune` removes them, and any host that shares the store may
    restore them, because the session's lease is given back. A session without a holder, such as a
    dumped PID, is forgotten: its exit code is unknown.
    """
    from ...ops.kill import kill as end

    body = end(app.config, name, timeout)
    count = body["killed"]
    for url in body["leases_kept"]:
        tell(
            f"criuctl: {printable(name)}: its lease in {printable(url)} could not be given back;"
            " another host restores it with --take-over"
        )
    app.emit(
        body,
        lambda: (
            f"{printable(name)}: {plural(count, 'process', 'processes')} ended, nothing is left"
        ),
        brief=lambda: "",
    )
    return 0

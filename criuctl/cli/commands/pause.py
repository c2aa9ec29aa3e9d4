"""``criuctl pause``."""

from __future__ import annotations

from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument
from ..text import plural, printable


@page(
    examples=[("Free the CPU for a while:", "criuctl pause build\ncriuctl resume build")],
    exits=[3, 9, 10],
    see_also=["resume", "halt", "signal"],
)
@name_argument
@pass_app
def pause(app: App, name: str) -> int:
    """Freeze every process of a session, at its current instruction, by the freezer of its control
    group, or without one by SIGSTOP. The program is not asked and notices only the passed time.
    Pausing a paused session changes nothing.

    A paused session can be dumped and migrated; it comes back paused, and criuctl resume lets it
    continue.
    """
    from ...ops.pause import pause as freeze

    body = freeze(app.config, name).to_dict()
    app.emit(
        body,
        lambda: f"{printable(name)}: {plural(body['processes'], 'process', 'processes')} frozen",
        brief=lambda: "",
    )
    return 0

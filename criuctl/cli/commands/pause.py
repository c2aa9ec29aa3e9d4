"""``criuctl pause``."""

from __future__ import annotations

from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument
from ..text import plural, printable


@page(
    examples=[
        ("Give the CPU to somebody else for a while:", "criuctl pause build\ncriuctl resume build")
    ],
    exits=[3, 9, 10],
    see_also=["resume", "halt", "signal"],
)
@name_argument
@pass_app
def pause(app: App, name: str) -> int:
    """Freezes every process of a session, where it is, by the freezer of its control group; where
    there is none, by SIGSTOP. The program is not asked and notices nothing but the time. Pausing
    what is paused changes nothing.

    A paused session can be dumped and migrated; it comes back paused, from where criuctl resume
    lets it go on.
    """
    from ...ops.pause import pause as freeze

    body = freeze(app.config, name).to_dict()
    app.emit(
        body,
        lambda: f"{printable(name)}: {plural(body['processes'], 'process', 'processes')} frozen",
        brief=lambda: "",
    )
    return 0

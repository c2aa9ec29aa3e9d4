"""``criuctl resume``."""

from __future__ import annotations

from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument
from ..text import printable


@page(
    examples=[("Go on:", "criuctl resume build")],
    exits=[3, 9, 10],
    see_also=["pause", "halt"],
)
@name_argument
@pass_app
def resume(app: App, name: str) -> int:
    """Let a session that was paused or halted continue. Processes that were stopped before that
    stay stopped.
    """
    from ...ops.pause import resume as go_on

    app.emit(
        go_on(app.config, name).to_dict(), lambda: f"{printable(name)}: goes on", brief=lambda: ""
    )
    return 0

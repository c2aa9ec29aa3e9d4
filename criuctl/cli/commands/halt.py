"""``criuctl halt``."""

from __future__ import annotations

from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument
from ..text import plural, printable


@page(
    examples=[
        (
            "Stop an agent that does the wrong thing:",
            "criuctl halt agent\ncriuctl attach agent\ncriuctl resume agent --agent-stays-out",
        )
    ],
    exits=[3, 9, 10],
    see_also=["pause", "resume", "role", "kill", "log"],
)
@name_argument
@pass_app
def halt(app: App, name: str) -> int:
    """Stop a session at once, without the help of its programs: every process is frozen, input that
    agents and services have queued is dropped, and the write lease is taken from them without
    asking. Input that a person typed stays. Until criuctl resume only humans write; attach to see
    what it was about to do. An agent cannot resume it.

    Every client says whether it is a human, an agent or a service. A command is a human's when it
    is run from a terminal, a service's otherwise, or what CRIUCTL_KIND says.
    """
    from ...ops.pause import halt as stop

    body = stop(app.config, name).to_dict()
    dropped = f", {plural(body['dropped'], 'byte')} of input dropped" if body["dropped"] else ""
    words = plural(body["processes"], "process", "processes")
    app.emit(body, lambda: f"{printable(name)}: {words} frozen{dropped}", brief=lambda: "")
    return 0

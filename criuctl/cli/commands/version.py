"""``criuctl version``."""

from __future__ import annotations

from ..app import App, pass_app
from ..pages import page
from ..text import facts, printable


@page(examples=[("For a bug report:", "criuctl version --json")], see_also=["doctor"])
@pass_app
def version(app: App) -> int:
    """Print the versions of criuctl, of the CRIU it uses (and its path), of the kernel, of Python,
    and the checkpoint formats that this criuctl reads and writes.
    """
    from ...ops.doctor import versions

    body = versions(app.config)

    criu, formats = body["criu"], body["formats"]

    def human() -> str:
        return facts(
            [
                ("criuctl", body["criuctl"]),
                (
                    "criu",
                    f"{criu['version']} ({printable(criu['argv'][-1])})" if criu else "none found",
                ),
                ("kernel", printable(body["kernel"])),
                ("arch", printable(body["arch"])),
                ("python", body["python"]),
                (
                    "formats",
                    f"reads {', '.join(map(str, formats['reads']))}; writes {formats['writes']}",
                ),
            ]
        )

    app.emit(body, human, brief=lambda: str(body["criuctl"]))
    return 0

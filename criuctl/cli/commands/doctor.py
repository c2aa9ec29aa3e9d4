"""``criuctl doctor``."""

from __future__ import annotations

from ...errors import CriuctlError
from ..app import App, pass_app
from ..pages import page
from ..text import plural
from .check import finding_lines

EXIT_PLATFORM = 13


def _exit_codes() -> dict[str, int]:
    """Every error class's code and the exit code that goes with it."""
    codes: dict[str, int] = {}
    classes = [CriuctlError]
    while classes:
        cls = classes.pop()
        codes.setdefault(cls.code, cls.exit_code)
        classes.extend(cls.__subclasses__())
    return codes


@page(
    examples=[("Is this host ready?", "criuctl doctor"), ("And with this store?", "criuctl doctor --store s3://backups/trees")],
    exits=[7, 8, 13],
    see_also=["check", "version", "store info"],
)
@pass_app
def doctor(app: App) -> int:
    """Checks what does not depend on a process tree: the CRIU that is used and what it can do on this kernel, the
    kernel's features, privileges, configuration, folders, and the store with its key. Each finding has a remedy.

    Ends with 0 when nothing stands in the way; with 13 when CRIU or the kernel does, with 7 or 8 when the store does.
    """
    from ...ops.doctor import doctor as examine

    found = [f.to_dict() for f in examine(app.config)]
    errors = [f for f in found if f["level"] == "error"]
    warnings = [f for f in found if f["level"] == "warning"]

    def human() -> str:
        verdict = "not ready" if errors else "ready"
        lines = [line for f in found for line in finding_lines(f)]
        return "\n".join([*lines, f"{verdict}: {plural(len(errors), 'error')}, {plural(len(warnings), 'warning')}"])

    def brief() -> str:
        return "\n".join(line for f in errors for line in finding_lines(f))

    app.emit({"ok": not errors, "findings": found}, human, brief)
    return _exit_codes().get(errors[0]["code"], EXIT_PLATFORM) if errors else 0

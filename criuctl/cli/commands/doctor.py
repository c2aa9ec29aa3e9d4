"""``criuctl doctor``."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ...errors import Conflict, CriuctlError, PlatformError, UsageError
from ..app import App, pass_app
from ..pages import page
from ..streams import tell
from ..text import facts, plural, printable, size
from .check import findings_lines

EXIT_PLATFORM = 13
_SPREAD = ("disks", "set")  # parts of a page that get one line for each entry
_TITLES = {"criu_logs": "What CRIU failed with", "events": "Newest events"}


def _exit_codes() -> dict[str, int]:
    """Return every error class's code and exit code."""
    codes: dict[str, int] = {}
    classes = [CriuctlError]
    while classes:
        cls = classes.pop()
        codes.setdefault(cls.code, cls.exit_code)
        classes.extend(cls.__subclasses__())
    return codes


@page(
    examples=[
        ("Is this host ready?", "criuctl doctor"),
        ("And with this store?", "criuctl doctor --store s3://backups/trees"),
        ("Get a CRIU that works here (Debian, as root):", "criuctl doctor --fix"),
        ("A page for a bug report:", "criuctl doctor --report page.md"),
    ],
    exits=[7, 8, 9, 13],
    see_also=["check", "version", "store info", "events"],
)
@click.option(
    "--report",
    "page_",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    type=click.Path(dir_okay=False),
    help=(
        "Write a page for a bug report, to a new FILE or on standard output.  [default: only the "
        "findings]"
    ),
)
@click.option(
    "--fix",
    is_flag=True,
    help="First prepare this host, on Debian and as root; asks before.  [default: change nothing]",
)
@click.option("--yes", is_flag=True, help="With --fix: do not ask.")
@pass_app
def doctor(app: App, page_: str | None, fix: bool, yes: bool) -> int:
    """Check everything that does not depend on a process tree: the CRIU that is used and its
    abilities on this kernel, the kernel's features, privileges, configuration, folders, and the
    store with its key. Each finding has a remedy.

    Exit with 0 when there is no obstacle; with 13 when CRIU or the kernel is one, with 7 or 8 when
    the store is.

    --fix prepares the host first, by the steps of scripts/setup: it installs the packages nftables,
    iproute2 and tini, tries each CRIU that it finds on this kernel, installs a newer one into
    /opt/criuctl next to the host's if none works, and makes CRIU's Python package importable for
    this criuctl. It says what it does and can be repeated. On other systems it names what to
    install.

    --report makes a page of these findings and of versions, kernel, memory and disks, the store,
    the settings, sessions, the newest events and the first errors in kept logs of CRIU. It contains
    no command lines, environments, labels or contents. Settings that may hold a secret are not
    shown, and the values of variables that sound like secrets are removed. Read it before you send
    it: it has names of this host, of sessions, users' folders and buckets. It exits with 0 whatever
    is wrong.
    """
    if yes and not fix:
        raise UsageError("--yes belongs to --fix")
    if page_ is not None:
        if fix:
            raise UsageError("--report changes nothing: --fix is a command of its own")
        return _report(app, page_)
    if fix:
        _prepare(app, yes)
    from ...ops.doctor import doctor as examine

    found = [f.to_dict() for f in examine(app.config)]
    errors = [f for f in found if f["level"] == "error"]
    warnings = [f for f in found if f["level"] == "warning"]

    def human() -> str:
        verdict = "not ready" if errors else "ready"
        lines = findings_lines(found)
        return "\n".join(
            [
                *lines,
                f"{verdict}: {plural(len(errors), 'error')}, {plural(len(warnings), 'warning')}",
            ]
        )

    def brief() -> str:
        return "\n".join(findings_lines(errors))

    app.emit({"ok": not errors, "findings": found}, human, brief)
    return _exit_codes().get(errors[0]["code"], EXIT_PLATFORM) if errors else 0


def _prepare(app: App, yes: bool) -> None:
    """Prepare the host, when the operator agrees; what is done is shown on standard error."""
    from ... import preparation
    from ...ops import prepare

    steps = prepare.plan()
    if not yes:
        if app.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(
                "--fix asks before it changes this host, and there is no terminal to ask at",
                hint=f"{preparation.fixing('--yes')} does not ask.",
            )
        tell("This prepares the host for criuctl:")
        for step in steps:
            tell(f"- {step}")
        if not click.confirm("Go on?", err=True):
            tell("nothing was changed")
            return
    prepare.prepare()


def _report(app: App, where: str) -> int:
    from ...ops.bug_report import report

    if where == "-":
        body = report(app.config)
        app.emit(body, lambda: _page(body))
        return 0
    try:
        # open it first: the rest takes a while
        fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
                body = report(app.config)
                file.write(_page(body) + "\n")
        except BaseException:
            os.unlink(where)  # remove an incomplete page, which would block the next one
            raise
    except FileExistsError as error:
        raise Conflict(f"{where} exists", hint="Name a new file.") from error
    except OSError as error:
        raise PlatformError(f"{where} cannot be written: {error.strerror}") from error
    app.emit(body, lambda: f"{printable(where)}: read it before you send it", brief=lambda: "")
    return 0


def _page(body: dict[str, Any]) -> str:
    """Format the page as Markdown: a heading and a block for each part."""
    lines = [f"# criuctl on a host, {body['made']}"]
    for name, part in body.items():
        if name == "made":
            continue
        lines += [
            "",
            f"## {_TITLES.get(name, name.capitalize())}",
            "",
            "```",
            *_block(name, part),
            "```",
        ]
    return "\n".join(lines)


def _block(name: str, part: Any) -> list[str]:
    if isinstance(part, dict) and set(part) == {"error"}:
        return [f"not available: {printable(part['error'])}"]
    if name == "findings":
        return findings_lines(part)
    if name == "events":
        from .events import line

        return [line(event) for event in part] or ["none"]
    if name == "criu_logs":
        return [f"{printable(log['log'])}: {printable(log['error'])}" for log in part] or ["none"]
    if name == "sessions":
        each = [
            f"{printable(one['session'])}: {one['state']}, incarnation {one['incarnation']}, "
            f"since {one['since'] or 'unknown'}"
            for one in part["sessions"]
        ]
        return [
            ", ".join(f"{count} {state}" for state, count in part["states"].items()) or "none",
            *each,
        ]
    rows: list[tuple[str, str]] = []
    for key, value in part.items():
        inner = value.items() if key in _SPREAD else [(key, value)]
        rows += [
            (inner_key.replace("_", " "), _words(inner_key, inner_value))
            for inner_key, inner_value in inner
        ]
    return facts(rows).splitlines()


def _words(key: str, value: Any) -> str:
    """Format a value, or its entries, on one line."""
    if isinstance(value, dict):
        return (
            ", ".join(
                f"{inner_key.replace('_', ' ')} {_words(inner_key, inner)}"
                for inner_key, inner in value.items()
            )
            or "none"
        )
    if isinstance(value, list):
        return " ".join(_words(key, inner) for inner in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int) and (key.endswith("bytes") or key.startswith(("Mem", "Swap"))):
        return size(value)
    return printable(str(value))

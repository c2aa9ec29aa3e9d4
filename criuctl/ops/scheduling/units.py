"""The systemd units that ship with criuctl: bringing sessions back at a boot, storing them before a
spot machine is taken away, keeping one alive, jobs of Slurm, the page in the browser.

A unit is a text in the package, with `@CRIUCTL@` where the command belongs. `install` writes it for
this criuctl into /etc/systemd/system. Settings of an operator belong into the file that the unit's
`EnvironmentFile=` names, or into a drop-in (`systemctl edit`), so a unit that differs from what is
to be written is never replaced unless that is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...errors import Conflict, NotFound, PlatformError, UsageError
from ...proc import command
from ...quoting import quoted
from ...session.names import check_name
from . import timers

PLACES = timers.Places()
PACKAGED = Path("/usr/lib/systemd/system")  # the units of criuctl's Debian package
NAMES = ("recover", "slurm", "spot", "supervise", "ui", "ui-read-only")
_TEXTS = Path(__file__).parents[2] / "units"
_COMMAND = "@CRIUCTL@"
_TIMEOUT = 60.0  # seconds for systemctl


class Unit(Struct, frozen=True):
    """One unit: `name` of `NAMES`, and the session of an instance of `supervise`."""

    name: str
    instance: str = ""

    @classmethod
    def parse(cls, text: str) -> Unit:
        """Return the unit that an operator names: ``ui``, ``supervise@SESSION``; `UsageError`."""
        name, at, instance = text.partition("@")
        if name not in NAMES or (at and name != "supervise"):
            raise UsageError(f"there is no unit {text!r}", hint=f"There are: {', '.join(NAMES)}.")
        return cls(name, check_name(instance) if at else "")

    @property
    def template(self) -> bool:
        """Whether it has instances, one for each session."""
        return self.name == "supervise"

    @property
    def file(self) -> str:
        """The file's name."""
        return f"criuctl-{self.name}{'@' if self.template else ''}.service"

    @property
    def started(self) -> str:
        """The name under which systemd starts it."""
        return f"criuctl-{self.name}@{self.instance}.service" if self.template else self.file

    @property
    def path(self) -> Path:
        """Where `install` writes it."""
        return PLACES.units / self.file

    @property
    def found(self) -> Path | None:
        """The file that systemd uses: ours, or that of the Debian package; None if there is
        none.
        """
        paths = (self.path, PACKAGED / self.file)
        return next((path for path in paths if os.path.lexists(path)), None)

    def text(
        self, argv: Sequence[str], variables: Mapping[str, str], options: Sequence[str] = ()
    ) -> str:
        """Return the file's contents for the criuctl that `argv` starts; `options` are added to
        those that the unit gives it by default.
        """
        for word in (*argv, *variables.values()):
            if not word.isprintable():
                raise UsageError(f"{word!r} has characters that cannot stand in a unit")
        text = (_TEXTS / self.file).read_text()
        text = text.replace(_COMMAND, timers.exec_words(argv))
        if options:
            text = re.sub(
                r'(?m)^Environment="?(\w+_OPTIONS=[^"\n]*)"?$',
                lambda found: f'Environment="{" ".join([found[1], *options])}"',
                text,
            )
        words = "\n".join(f"Environment={word}" for word in timers.environment_words(variables))
        return text.replace("[Service]\n", f"[Service]\n{words}\n", 1)


def install(
    units: Sequence[Unit],
    argv: Sequence[str],
    variables: Mapping[str, str],
    *,
    replace: bool = False,
    now: bool = False,
) -> list[Path]:
    """Write the units; return the files that were written. With `now`, enable and start them.

    A file that is there already with the same contents stays. Raise `Conflict` for one with other
    contents, before anything is written, unless `replace`.
    """
    for unit in units:
        if now and unit.template and not unit.instance:
            raise UsageError(
                "--now needs the session that is to be kept alive",
                hint="Name it: `criuctl unit install supervise@SESSION --now`.",
            )
    texts = {unit: unit.text(argv, variables) for unit in units}
    wanted = {unit.path: text for unit, text in texts.items() if _current(unit) != text}
    for path in wanted if not replace else ():
        if os.path.lexists(path):
            raise Conflict(
                f"{path} is there already, and is not what would be written",
                hint="--replace replaces it; settings of yours belong into `systemctl edit`.",
            )
    _need_systemd()
    try:
        for path, text in wanted.items():
            path.unlink(missing_ok=True)
            timers.write_new(path, text)
    except OSError as error:
        raise PlatformError(
            f"{error.filename} cannot be written: {error.strerror}", hint="Run criuctl as root."
        ) from error
    if wanted:
        _control("daemon-reload")
    if now:
        _control("enable", "--quiet", "--now", *(unit.started for unit in units))
    return list(wanted)


def remove(units: Sequence[Unit]) -> list[Path]:
    """Stop and disable the units, and remove their files; return those. Sessions run on.

    With an instance, only that one is stopped and disabled; the files of the Debian package stay.
    Raise `NotFound` for a unit that is not
    installed.
    """
    for unit in units:
        if unit.found is None:
            raise NotFound(
                f"{unit.path} does not exist", hint="`criuctl unit list` shows what is installed."
            )
    running = PLACES.booted.is_dir()
    removed = []
    for unit in units:
        started = [unit.started] if unit.instance or not unit.template else _instances(unit)
        if running and started:
            _control("disable", "--quiet", "--now", *started)
        if unit.instance or unit.found != unit.path:
            continue
        for link in [*PLACES.units.glob("*.wants/*")]:
            if link.name in started:
                link.unlink(missing_ok=True)
        try:
            unit.path.unlink(missing_ok=True)
        except OSError as error:
            raise PlatformError(
                f"{unit.path} cannot be removed: {error.strerror}", hint="Run criuctl as root."
            ) from error
        removed.append(unit.path)
    if running and removed:
        _control("daemon-reload")
    return removed


def listed(argv: Sequence[str], variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return each unit with its file, whether that is what `install` would write, and what runs:
    the JSON of `criuctl unit list`.
    """
    found = []
    for unit in map(Unit, NAMES):
        text = _current(unit)
        instances = _instances(unit) if text is not None else []
        found.append(
            {
                "name": unit.name,
                "unit": unit.file,
                "file": None if text is None else str(unit.found),
                "current": None if text is None else text == unit.text(argv, variables),
                "active": [name for name in instances if _active(name)],
                "enabled": [name for name in instances if _enabled(name)],
            }
        )
    return found


def _instances(unit: Unit) -> list[str]:
    """Return the names of this unit that are enabled or that systemd has loaded."""
    if not unit.template:
        return [unit.file]
    pattern = unit.file.replace("@", "@*")
    names = {link.name for link in PLACES.units.glob(f"*.wants/{pattern}")}
    if PLACES.booted.is_dir():
        done = _control("list-units", "--all", "--plain", "--no-legend", pattern, check=False)
        names |= {line.split()[0] for line in done.text.splitlines() if line.split()}
    return sorted(names)


def _active(name: str) -> bool:
    words = ("is-active", "--quiet", name)
    return PLACES.booted.is_dir() and _control(*words, check=False).returncode == 0


def _enabled(name: str) -> bool:
    return any(link.name == name for link in PLACES.units.glob("*.wants/*"))


def _current(unit: Unit) -> str | None:
    """Return what is in the file; None if there is none."""
    path = unit.found
    if path is None:
        return None
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PlatformError(
            f"{path} cannot be read: {error.strerror}", hint=f"See `ls -l {quoted(path)}`."
        ) from error


def _need_systemd() -> None:
    if not PLACES.booted.is_dir():
        raise PlatformError(
            "systemd does not run here, so there is nothing that units would be for",
            hint="Have `criuctl recover`, `supervise` and `ui` called by what you have.",
        )


def _control(*words: str, check: bool = True) -> command.Completed:
    done = command.run([*PLACES.systemctl, *words], timeout=_TIMEOUT, check=False)
    if check and done.returncode:
        said = (done.error_text or done.text).strip().splitlines() or ["no reason given"]
        raise PlatformError(
            f"systemctl {words[0]} failed: {said[-1]}",
            hint="The files of the units stay; `systemctl status` and `journalctl -u` say more.",
        )
    return done

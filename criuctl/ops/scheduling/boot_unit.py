"""Running `criuctl recover` at each boot: a systemd service where systemd runs, otherwise an
@reboot entry in /etc/cron.d.

It is written into the folders of a schedule's timer (`timers`), from the text of the unit that
ships (`units`), so `criuctl unit` knows it. The service ends when criuctl does, and the restored
trees live on: systemd ends criuctl alone.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import CriuctlError, NotFound, PlatformError, UsageError
from ...proc import command
from . import timers
from .units import Unit

NAME = "criuctl-recover"
PLACES = timers.Places()
_TIMEOUT = 60.0  # seconds for systemctl
_BOOT_PAUSE = "30s"  # for networks and stores that are slow to come up


def install(
    program: Sequence[str], options: Sequence[str], variables: Mapping[str, str]
) -> list[Path]:
    """Have `program` called with ``recover`` and `options` at each boot; return what was written.
    Raise `Conflict` if it is there already; after a failure nothing is left.
    """
    argv = [*program, "recover", "--retry-after", _BOOT_PAUSE, *options]
    for text in (*argv, *variables.values()):
        if not text.isprintable():
            raise UsageError(f"{text!r} has characters that cannot stand in a unit or a crontab")
    service, crontab = _files()
    if PLACES.booted.is_dir():
        path, text = service, Unit("recover").text(program, variables, options)
    elif PLACES.cron.is_dir():
        path, text = crontab, _crontab(argv, variables)
    else:
        raise PlatformError(
            "nothing here starts programs at a boot: systemd does not run, and there is no "
            f"{PLACES.cron}",
            hint="Have `criuctl recover` called by what you have.",
        )
    try:
        timers.write_new(path, text)
    except OSError as error:
        raise PlatformError(
            f"{path} cannot be written: {error.strerror}", hint="Run criuctl as root."
        ) from error
    if path == service:
        try:
            _control("daemon-reload")
            _control("enable", "--quiet", path.name)
        except BaseException:
            remove()
            raise
    return [path]


def remove() -> list[Path]:
    """Remove it; return what was removed. Raise `NotFound` if there was nothing."""
    service, crontab = _files()
    link = PLACES.units / "multi-user.target.wants" / service.name
    present = [path for path in (service, crontab, link) if os.path.lexists(path)]
    if not present:
        raise NotFound(
            "nothing calls `criuctl recover` at a boot",
            hint="`criuctl recover --install` has it called.",
        )
    try:
        for path in present:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise PlatformError(
            f"{error.filename} cannot be removed: {error.strerror}", hint="Run criuctl as root."
        ) from error
    if PLACES.booted.is_dir() and (service in present or link in present):
        _control("daemon-reload")
    return [path for path in present if path != link]


def _files() -> tuple[Path, Path]:
    return PLACES.units / f"{NAME}.service", PLACES.cron / NAME


def _control(*words: str) -> None:
    try:
        command.run([*PLACES.systemctl, *words], timeout=_TIMEOUT)
    except CriuctlError as error:
        raise PlatformError(
            f"systemd does not take the service: {error.message}", hint="Try `systemctl status`."
        ) from error


def _origin() -> str:
    return "# Written by `criuctl recover --install`; `criuctl recover --remove` removes it."


def _crontab(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    words = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
    # cron ends the command at an unescaped %
    line = " ".join([*words, shlex.join([*argv, "--quiet"])]).replace("%", "\\%")
    return "\n".join(
        [_origin(), "SHELL=/bin/sh", f"PATH={command.SYSTEM_PATH}", f"@reboot root {line}", ""]
    )

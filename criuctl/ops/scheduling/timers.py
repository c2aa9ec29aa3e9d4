"""The timers of schedules: a systemd timer where systemd runs, otherwise an entry in
/etc/cron.d.

Both only ever run ``criuctl schedule run NAME``; the rest is in the schedule's definition, so no
unit has to be edited. Files are written next to their place and linked into it, so no half-written
file is ever read, and an existing one is never overwritten. cron ignores files with a dot in their
names, so it does not see the temporary ones either.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from ...errors import CommandFailed, Conflict, CriuctlError, PlatformError, UsageError
from ...proc import command
from . import calendars

PREFIX = "criuctl-schedule-"
_TIMEOUT = 60.0  # seconds for systemctl
_SPARE = 300  # seconds after its own deadline in which a run must have cleaned up


class Places(Struct, frozen=True):
    """The folders of the back ends, and the paths that show which of them is present."""

    booted: Path = Path("/run/systemd/system")
    units: Path = Path("/etc/systemd/system")
    cron: Path = Path("/etc/cron.d")
    systemctl: tuple[str, ...] = ("systemctl",)


class Trigger(Struct, frozen=True):
    """When which command is to be started; either `every` (seconds) or `at` (a calendar) is set."""

    name: str
    every: float
    at: str
    jitter: float
    deadline: float
    argv: tuple[str, ...]
    variables: Mapping[str, str]


class Systemd:
    """A timer and the service that it starts."""

    kind = "systemd"

    def __init__(self, places: Places) -> None:
        self._places = places

    def files(self, name: str) -> list[Path]:
        """Return the files for a schedule."""
        return [self._places.units / f"{PREFIX}{name}.{suffix}" for suffix in ("service", "timer")]

    def check(self, trigger: Trigger) -> None:
        """Raise `UsageError` for a calendar that systemd does not understand."""
        if not trigger.at:
            return
        try:
            done = command.run(
                ["systemd-analyze", "calendar", "--", trigger.at], timeout=_TIMEOUT, check=False
            )
        except PlatformError:
            return  # not installed: systemctl reports it later
        if done.returncode:
            said = (done.error_text or done.text).strip().splitlines() or ["no reason given"]
            raise UsageError(
                f"{trigger.at!r} is no calendar: {said[0]}",
                hint=(
                    "As in `man systemd.time`: daily, 'Mon..Fri 08:30', '*:0/15'; "
                    "`systemd-analyze calendar` tries one."
                ),
            )

    def install(self, trigger: Trigger) -> None:
        """Write both units and start the timer."""
        service, timer = self.files(trigger.name)
        with _removed_on_error(self, trigger.name, (service, timer)):
            write_new(service, self._service(trigger))
            write_new(timer, self._timer(trigger))
            self._control("daemon-reload")
            self._control("enable", "--quiet", "--now", timer.name)

    def _service(self, trigger: Trigger) -> str:
        limit = f"{int(trigger.deadline) + _SPARE}s" if trigger.deadline else "infinity"
        return "\n".join(
            [
                _origin(trigger.name),
                "[Unit]",
                f"Description=criuctl snapshots by the schedule {trigger.name}",
                "Wants=network-online.target",
                "After=network-online.target",
                "",
                "[Service]",
                "Type=oneshot",
                *(f"Environment={word}" for word in environment_words(trigger.variables)),
                f"ExecStart={exec_words(trigger.argv)}",
                f"TimeoutStartSec={limit}",
                # Only criuctl itself gets the signal: it knows in which order its processes must
                # end.
                "KillMode=mixed",
                "SuccessExitStatus=11",
                "",
            ]
        )

    def _timer(self, trigger: Trigger) -> str:
        if trigger.at:
            when = [f"OnCalendar={trigger.at}", "Persistent=true"]
        else:
            # The first counts from the timer's start, at a boot too; Persistent is for calendars
            # only.
            when = [
                f"OnActiveSec={_span(trigger.every)}",
                f"OnUnitActiveSec={_span(trigger.every)}",
            ]
        return "\n".join(
            [
                _origin(trigger.name),
                "[Unit]",
                f"Description=When criuctl takes snapshots by the schedule {trigger.name}",
                "",
                "[Timer]",
                *when,
                *([f"RandomizedDelaySec={_span(trigger.jitter)}"] if trigger.jitter else []),
                "AccuracySec=1s",
                "",
                "[Install]",
                "WantedBy=timers.target",
                "",
            ]
        )

    def remove(self, name: str) -> bool:
        """Stop the timer and remove all its files; return False if there were none. A run under way
        continues.
        """
        service, timer = self.files(name)
        link = self._places.units / "timers.target.wants" / timer.name
        present = [path for path in (timer, service, link) if os.path.lexists(path)]
        if not present:
            return False
        running = self._places.booted.is_dir()
        if running:
            self._control("disable", "--quiet", "--now", timer.name, check=False)
            self._keep_while_running(service)
        for path in present:
            path.unlink(missing_ok=True)
        if running:
            self._control("daemon-reload")
            self._control("reset-failed", service.name, timer.name, check=False)
        return True

    def _keep_while_running(self, service: Path) -> None:
        """Keep the settings of a run under way, which systemd would forget with the file, and then
        end the run after its default 90 s.

        If the run fails, the journal and the hooks report it; nothing of a removed schedule stays
        among the failed units.
        """
        state = self._control(
            "show", "--property=ActiveState", "--value", service.name, check=False
        ).text.strip()
        if state not in ("activating", "deactivating") or not service.exists():
            return
        kept = self._places.booted / service.name
        kept.unlink(missing_ok=True)
        text = service.read_text().replace(
            "[Unit]\n", "[Unit]\nCollectMode=inactive-or-failed\n", 1
        )
        write_new(kept, f"{text}ExecStopPost=rm -f {_unit_word(str(kept))}\n")

    def next_runs(self, triggers: Sequence[Trigger]) -> dict[str, datetime]:
        """Return when each will be started next, where systemd reports it."""
        try:
            done = self._control(
                "list-timers", "--all", "--output=json", f"{PREFIX}*.timer", check=False
            )
            listed = json.loads(done.text or "[]")
        except (CriuctlError, ValueError):
            return {}
        wanted = {f"{PREFIX}{t.name}.timer": t.name for t in triggers}
        found = {
            wanted[row["unit"]]: row.get("next") for row in listed if row.get("unit") in wanted
        }
        return {
            name: datetime.fromtimestamp(at / 1e6, UTC)
            for name, at in found.items()
            if isinstance(at, int) and 0 < at < 1 << 55
        }

    def _control(self, *words: str, check: bool = True) -> command.Completed:
        return command.run([*self._places.systemctl, *words], timeout=_TIMEOUT, check=check)


class Cron:
    """A file in /etc/cron.d."""

    kind = "cron"

    def __init__(self, places: Places) -> None:
        self._places = places

    def files(self, name: str) -> list[Path]:
        """Return the files for a schedule."""
        return [self._places.cron / f"{PREFIX}{name}"]

    def check(self, trigger: Trigger) -> None:
        """Raise `UsageError` for what cron cannot express."""
        self._time(trigger)

    def _time(self, trigger: Trigger) -> calendars.CronTime:
        return (
            calendars.cron_time(trigger.at) if trigger.at else calendars.cron_every(trigger.every)
        )

    def install(self, trigger: Trigger) -> None:
        """Write the file; cron looks for new ones every minute."""
        words = [f"{key}={shlex.quote(value)}" for key, value in trigger.variables.items()]
        # cron has no jitter, so criuctl does it. cron mails all output: only failures are printed.
        words += [shlex.join([*trigger.argv, "--quiet", *(["--delay"] if trigger.jitter else [])])]
        line = " ".join(words).replace("%", "\\%")  # cron ends the command at an unescaped %
        text = [
            _origin(trigger.name),
            "SHELL=/bin/sh",
            f"PATH={command.SYSTEM_PATH}",
            f"{self._time(trigger)} root {line}",
            "",
        ]
        path = self.files(trigger.name)[0]
        with _removed_on_error(self, trigger.name, (path,)):
            write_new(path, "\n".join(text))

    def remove(self, name: str) -> bool:
        """Remove the file; return False if there was none."""
        try:
            self.files(name)[0].unlink()
        except FileNotFoundError:
            return False
        return True

    def next_runs(self, triggers: Sequence[Trigger]) -> dict[str, datetime]:
        """Return when cron will start each next, by this host's clock and time zone."""
        now = datetime.now().astimezone().replace(tzinfo=None)
        found = {t.name: self._time(t).after(now) for t in triggers}
        return {name: at.astimezone(UTC) for name, at in found.items() if at is not None}


Backend = Systemd | Cron


def backends(places: Places) -> dict[str, Backend]:
    """Return all back ends, by kind."""
    return {Systemd.kind: Systemd(places), Cron.kind: Cron(places)}


def here(places: Places) -> Backend:
    """Return the back end for new schedules of this host; raise `PlatformError` if there is
    none.
    """
    if places.booted.is_dir():
        return Systemd(places)
    if places.cron.is_dir():
        return Cron(places)
    raise PlatformError(
        f"nothing here starts schedules: systemd does not run, and there is no {places.cron}",
        hint="Install cron, or call `criuctl snapshot` from what you have.",
    )


def _origin(name: str) -> str:
    return (
        f"# Written by `criuctl schedule add {name}`; `criuctl schedule remove {name}` removes it."
    )


def _unit_word(text: str) -> str:
    """Return one word of a setting of a unit."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _span(seconds: float) -> str:
    """Return a span of time as systemd reads it: digits alone, however long it is."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def environment_words(variables: Mapping[str, str]) -> list[str]:
    """Return these variables and the user's HOME, as words of a unit."""
    known = {"HOME": pwd.getpwuid(os.geteuid()).pw_dir, **variables}
    return [_unit_word(f"{key}={value}") for key, value in known.items()]


def exec_words(argv: Sequence[str]) -> str:
    """Return a command line for a unit, escaped against systemd's expansion of variables."""
    return " ".join(_unit_word(word.replace("$", "$$")) for word in argv)


@contextlib.contextmanager
def _removed_on_error(backend: Backend, name: str, files: Sequence[Path]) -> Iterator[None]:
    """Raise `Conflict` if one of the files exists; after an error remove all of them."""
    for path in files:
        if os.path.lexists(path):
            raise Conflict(
                f"{path} is there already",
                hint="Choose another name, or remove the file if it is not needed.",
            )
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(CriuctlError, OSError):
            backend.remove(name)
        with contextlib.suppress(OSError):
            # if systemctl is missing, or does not answer, they still exist
            for path in files:
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise PlatformError(
                f"{error.filename or files[0]} cannot be written: {error.strerror}",
                hint="Run criuctl as root.",
            ) from error
        if isinstance(error, CommandFailed):
            raise PlatformError(
                f"systemd does not take the timer: {error.message}",
                hint="Nothing was left of it; try `systemctl status`.",
            ) from error
        raise


def write_new(path: Path, text: str) -> None:
    """Write a new file of mode 0644, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644), "w") as file:
            # whatever the umask: cron ignores files that the group may write
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        raise Conflict(f"{path} is there already") from None
    finally:
        temporary.unlink(missing_ok=True)


def own_program(argv0: str, interpreter: str) -> tuple[str, ...]:
    """Return the command that starts this criuctl again, from any folder."""
    path = Path(argv0)
    if path.name == "criuctl" and path.is_file() and os.access(path, os.X_OK):
        return (str(path.absolute()),)
    return (interpreter, "-m", "criuctl")

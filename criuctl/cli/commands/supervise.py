"""``criuctl supervise``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click

from .. import complete
from ..app import DEGRADED, App, pass_app
from ..pages import page
from ..streams import ResultLost, discard, write_result
from ..text import printable, size

_COUNT = click.IntRange(min=1)


def _snapshot(event: Mapping[str, Any]) -> str:
    stored = size(event["bytes"]["stored"])
    return (
        f"{event['session']}@{event['number']} stored ({event['reason']}): frozen "
        f"{event['frozen_ms']:.0f} ms, {stored} new"
    )


def _recovered(event: Mapping[str, Any]) -> str:
    newer = f"; @{event['newer']['number']} was newer" if event.get("newer") else ""
    lost = f", {event['lost_s']:.1f} s lost" if "lost_s" in event else ""
    place = f" from host {event['from_host']}" if "from_host" in event else ""
    return (
        f"recovered{place} from {event['session']}@{event['number']} after "
        f"{event['recovered_ms'] / 1000:.1f} s{lost}{newer}"
    )


def _left(event: Mapping[str, Any]) -> str:
    if not event["runs"]:
        return ""
    return (
        "; the session stands still until its lease can be renewed"
        if event.get("still")
        else "; the session runs on"
    )


_LINES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda e: (
        f"supervised from now on, as {'home' if e['role'] == 'recover' else e['role']}"
    ),
    "unleased": lambda e: e["text"],
    "home": lambda e: f"lives here as PID {e['pid']}, incarnation {e['incarnation']}",
    "standby": lambda e: "stands by",
    "snapshot": _snapshot,
    "snapshot-failed": lambda e: (
        f"no snapshot ({e['reason']}), again in {e['again_s']:g} s: {e['error']['message']}"
    ),
    "prune-failed": lambda e: f"not pruned: {e['error']['message']}",
    "at-risk": lambda e: f"{e['loss_s']:g} s would be lost by now, more than {e['max_loss_s']:g} s",
    "safe": lambda e: f"no more than {e['loss_s']:g} s would be lost again",
    "died": lambda e: e["text"],
    "ended": lambda e: f"is over: {e['text']}",
    "waiting": lambda e: f"waits for {e['seconds']:g} s, after {e['failures']} failures in a row",
    "passed-over": lambda e: (
        f"{(e.get('checkpoint') or 'a checkpoint')[:12]} is skipped: {e['error']['message']}"
    ),
    "restore-failed": lambda e: f"not restored: {e['error']['message']}",
    "recovered": _recovered,
    "gave-up": lambda e: e["error"]["message"],
    "lease-expired": lambda e: f"no beat was seen of host {e['host']} for {e['silent_s']:g} s",
    "overtaken": lambda e: f"not restored here: {e['error']['message']}",
    "self-fenced": lambda e: (
        f"the lease of {e['lease_s']:g} s cannot be renewed; the session is paused, because "
        "another host may take it over"
    ),
    "goes-on": lambda _e: "the lease is renewed, the session continues",
    "fenced": lambda e: f"{e.get('text') or 'taken over'}; the copy here: {e['done']}",
    "store-failed": lambda e: f"the store cannot be used: {e['error']['message']}",
    "lease-runs-out": lambda e: (
        f"the store could not record that the lease of {e['lease_s']:g} s is to stay: a standby "
        "may take over what runs here"
    ),
    "stopped": lambda e: f"no longer supervised{_left(e)}",
}


def event_line(event: Mapping[str, Any]) -> str:
    """Return an event as a line: when, which session, what."""
    return (
        f"{event['time']}  {printable(event['session'])}  {event['event']}: "
        f"{printable(_LINES[event['event']](event))}"
    )


def _print(app: App, event: dict[str, Any]) -> None:
    """Print an event; the session is supervised even when the output is closed."""
    try:
        if app.json:
            import json

            write_result(json.dumps(event, default=str))
        elif not app.quiet or event["event"] not in ("snapshot", "started", "home", "standby"):
            write_result(event_line(event))
    except (BrokenPipeError, ResultLost):
        discard(1)


@page(
    examples=[
        (
            "Lose a minute at most:",
            "criuctl supervise web --every 1min --max-loss 3min --keep-last 20",
        ),
        (
            "A shell: whenever it is at its prompt again, or idle:",
            "criuctl supervise work --on-step --on-idle 30s",
        ),
        (
            "On a second host, with the same store:",
            "criuctl supervise web --every 1min --standby --store s3://backups/trees",
        ),
    ],
    exits=[3, 4, 6, 7, 8, 9, 11, 12, 13],
    see_also=["snapshot", "restore", "fence", "migrate", "prune", "schedule"],
)
@click.argument("name", shell_complete=complete.session_name, help="The session.")
@click.option(
    "--every",
    metavar="SPAN",
    help=(
        "Take a snapshot each SPAN: 30s, 5min.  [default: 60s, or half of --max-loss; none with "
        "--on-idle or --on-step alone]"
    ),
)
@click.option(
    "--on-idle",
    metavar="SPAN",
    help=(
        "Take a snapshot once its terminal has printed something, and then nothing for SPAN.  "
        "[default: no]"
    ),
)
@click.option(
    "--on-step",
    is_flag=True,
    help="Take a snapshot once a shell in it has run a command and is at its prompt again.",
)
@click.option(
    "--max-loss",
    metavar="SPAN",
    help="Report when more than SPAN would be lost because snapshots fail.  [default: no]",
)
@click.option(
    "--keep-last",
    type=click.IntRange(min=2),
    metavar="N",
    help="After each snapshot keep only the N newest.  [default: all]",
)
@click.option(
    "--with-files",
    multiple=True,
    metavar="PATH",
    help=(
        "Store this file, or all files of this folder, too; may be repeated.  [default: by "
        "configuration]"
    ),
)
@click.option(
    "--standby", is_flag=True, help="Watch the session's lease; start it only when that expires."
)
@click.option(
    "--restart",
    type=click.Choice(["on-failure", "always", "never"]),
    default="on-failure",
    show_default=True,
    help=(
        "Whether to restore it after it has ended by itself, with an exit code. A session that was "
        "killed is always restored."
    ),
)
@click.option(
    "--max-restores",
    type=_COUNT,
    default=3,
    show_default=True,
    metavar="N",
    help="Give up after N unsuccessful restores in a row.",
)
@click.option(
    "--stable-after",
    default="60s",
    show_default=True,
    metavar="SPAN",
    help="A restore is successful if the session runs for this long.",
)
@click.option(
    "--backoff",
    default="1s",
    show_default=True,
    metavar="SPAN",
    help="Wait this long before the second try, and twice as long before each later one.",
)
@click.option(
    "--max-backoff",
    default="5min",
    show_default=True,
    metavar="SPAN",
    help="The longest wait between tries.",
)
@click.option(
    "--lease",
    default="30s",
    show_default=True,
    metavar="SPAN",
    help="Standbys take the session over when this host has not renewed its lease for SPAN.",
)
@click.option(
    "--self-fence",
    is_flag=True,
    help=(
        "Stop the session while this host cannot renew its lease, before others may take it over. "
        " [default: let it continue]"
    ),
)
@pass_app
def supervise(
    app: App,
    name: str,
    every: str | None,
    on_idle: str | None,
    on_step: bool,
    max_loss: str | None,
    keep_last: int | None,
    with_files: tuple[str, ...],
    standby: bool,
    restart: str,
    max_restores: int,
    stable_after: str,
    backoff: str,
    max_backoff: str,
    lease: str,
    self_fence: bool,
) -> int:
    """Keep a session alive, in the foreground, for a service manager: take snapshots of it while it
    runs, and restore it from the newest good one when it was killed, when its host has been started
    again, or when it ended and --restart applies. A checkpoint that is damaged or cannot be
    restored is skipped for the one before. After --max-restores in a row that fail, or die again,
    the supervisor stops and exits with 6.

    The same command on other hosts, with the same store, is a standby there. The home renews its
    lease in the store. When a standby has seen no change of the lease for --lease, by its own
    clock, it takes the session over and restores it; of several standbys only one does. When the
    old home is back, it ends its copy and becomes a standby. This needs a store with conditional
    writes (local folders and most S3 servers have them), and the session's files and addresses on
    the other host.

    A home that is only cut off continues to run the session until it reaches the store again,
    unless --self-fence is given. With it the session is stopped, as by criuctl pause, once three
    quarters of --lease have passed without a renewal, also when this command was killed, and
    continues when the lease is renewed. So it never runs in two places; but each longer outage of
    the store stops it, and then it may not run on any host. criuctl resume lets it continue anyway.
    A host that was suspended or frozen itself stops the session as soon as it runs again.

    A session that was dumped, killed or migrated by a command is over for its supervisor (exit 0),
    and so is one that ended when --restart does not apply. SIGTERM ends the supervisor and leaves
    the session running, with a lease that does not expire. Hooks: loss-exceeded, recovered,
    gave-up.

    Each event is a line, with --json a JSON object per line: event, sequence, time, session, and
    facts, such as recovered_ms and lost_s of the event recovered. Exit with 11 if the supervisor
    was stopped when more than --max-loss would be lost.
    """
    from ...host.retention import patience
    from ...ops.supervise import supervise as look_after
    from ...ops.supervising.context import SupervisorSettings
    from ..output import NoticeReporter

    settings = SupervisorSettings(
        every=patience(every) if every is not None else None,
        on_idle=patience(on_idle),
        on_step=on_step,
        max_loss=patience(max_loss),
        keep_last=keep_last or 0,
        with_files=with_files,
        standby=standby,
        restart=restart,  # type: ignore[arg-type]  # click has checked it
        max_restores=max_restores,
        stable=patience(stable_after),
        backoff=patience(backoff),
        max_backoff=patience(max_backoff),
        lease=patience(lease),
        self_fence=self_fence,
    )
    tell = partial(_print, app)
    if app.verbose:
        with app.reporting() as reporter:
            good = look_after(app.config, name, settings, reporter=reporter, tell=tell)
    else:
        good = look_after(app.config, name, settings, reporter=NoticeReporter(), tell=tell)
    return 0 if good else DEGRADED

"""``criuctl maintenance watch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click

from ..app import App, pass_app
from ..pages import page
from ..streams import ResultLost, discard, write_result
from ..text import printable
from .snapshot import JOBS

_LINES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda e: f"on {e['cloud']}, whose shortest notice gives {e['window_s']:g} s",
    "stopped": lambda _e: "no longer watching",
    "metadata-failed": lambda e: f"no notice can be seen: {e['error']['message']}",
    "metadata-back": lambda _e: "notices can be seen again",
    "announced": lambda e: f"{e['action']} in {e['left_s']:g} s; nothing is begun yet",
    "ignored": lambda e: f"{e['action']}: ignored, as --on-rebalance says",
    "notice": lambda e: f"{e['kind']} ({e['action']}): {e['left_s']:g} s are left",
    "does-not-fit": lambda e: (
        f"all of it needs {e['needs_s']:g} s, and {e['left_s']:g} s are left: by the last dumps, "
        f"not stored in time: {', '.join(e['sessions'])}"
    ),
    "too-slow": lambda e: (
        f"a dump of {e['session']} takes {e['seconds']:g} s, more than the {e['window_s']:g} s of "
        "a notice; frequent snapshots make it shorter"
    ),
    "stored": lambda e: (
        f"{e['session']}: checkpoint {e['checkpoint'][:12]}, {e['left_s']:g} s left"
    ),
    "gone": lambda e: f"{e['session']}: has ended of itself",
    "failed": lambda e: f"{e['session']}: {e['error']['message']}",
    "begin-failed": lambda e: f"nothing is stored: {e['error']['message']}",
    "done": lambda e: (
        f"{e['stored']} stored, {e['left_s']:g} s left"
        + (f"; NOT stored: {', '.join(e['not_stored'])}" if e["not_stored"] else "")
    ),
    "acknowledged": lambda e: f"{e['action']} may begin",
    "acknowledge-failed": lambda e: f"not acknowledged: {e['error']['message']}",
    "withdrawn": lambda _e: (
        "the notice no longer stands; `criuctl maintenance end` brings back what was stored"
    ),
}


def event_line(event: Mapping[str, Any]) -> str:
    """Return an event as a line: when, what."""
    text = _LINES[event["event"]](event)
    return f"{event['time']}  {event['event']}: {printable(text)}"


def _print(app: App, event: Mapping[str, Any]) -> None:
    """Print an event; the watch goes on even when the output is closed."""
    try:
        if app.json:
            import json

            write_result(json.dumps(event, default=str))
        elif not app.quiet or event["event"] not in ("started", "stored", "stopped"):
            write_result(event_line(event))
    except (BrokenPipeError, ResultLost):
        discard(1)


@page(
    examples=[
        ("On each spot machine, as a service:", "criuctl unit install spot --now"),
        ("By hand, for a machine of Amazon's:", "criuctl maintenance watch --cloud aws --jobs 4"),
        (
            "What it would be like, with a service of your own:",
            "criuctl maintenance watch --cloud aws --metadata http://127.0.0.1:1338",
        ),
    ],
    exits=[2, 7, 9, 13],
    see_also=["maintenance begin", "recover", "unit", "supervise"],
)
@click.option(
    "--cloud",
    type=click.Choice(["aws", "gcp", "azure", "auto"]),
    default="auto",
    show_default=True,
    help="Whose notices to watch for; auto asks the metadata service.",
)
@JOBS
@click.option(
    "--window",
    metavar="SPAN",
    help="Use at most SPAN of what a notice gives.  [default: all of it: aws 2min, gcp and azure "
    "30s, or the time that the notice names]",
)
@click.option(
    "--on-rebalance",
    type=click.Choice(["snapshot", "dump", "ignore"]),
    default="snapshot",
    show_default=True,
    help="What to do when the cloud only recommends to leave: store everything and leave it "
    "running, store and end it, or nothing.",
)
@click.option(
    "--metadata",
    metavar="URL",
    default="http://169.254.169.254",
    show_default=True,
    help="The address of the metadata service.",
)
@pass_app
def watch(
    app: App, cloud: str, jobs: int, window: str | None, on_rebalance: str, metadata: str
) -> int:
    """Watch for the cloud's notice that this spot machine is about to be taken away, in the
    foreground, for a service manager. On a notice do as maintenance begin does: refuse new
    sessions, then dump and end everything within the time that the notice gives. A machine that
    takes its place restores it: criuctl recover --from-store.

    If not all fits, by the time that the last dumps took, the most valuable goes first: by the
    label priority=N, the higher first; then by the processor time that was used since the last
    checkpoint. Otherwise the order is that of maintenance begin. What fails is tried again while
    there is time. What does not fit is reported at once, and already before any notice: a session
    whose last dump took longer than the shortest notice gives.

    Notices: on aws, spot interruptions (2 minutes) and rebalance recommendations; on gcp,
    preemptions (30 seconds) and maintenance that ends the machine; on azure, Scheduled Events that
    end this machine (30 seconds or more), which are acknowledged once all is stored. It is not
    begun earlier than 5 minutes ahead.

    Each event is a line, with --json a JSON object per line: event, sequence, time, and facts.
    SIGTERM ends the watch; what was being dumped runs on.
    """
    from ...host.retention import patience
    from ...ops.spot.clouds import chosen
    from ...ops.spot.watch import Watch, WatchSettings
    from ..output import NoticeReporter

    settings = WatchSettings(
        jobs,
        patience(window),
        on_rebalance,  # type: ignore[arg-type]  # click has checked it
    )
    found = chosen(cloud, metadata)
    tell = partial(_print, app)
    Watch(app.config, found, settings, reporter=NoticeReporter(), tell=tell).run()
    return 0

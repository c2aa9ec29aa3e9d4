"""``criuctl metrics``."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import click

from ..app import App, pass_app
from ..extras import need
from ..pages import page
from ..streams import tell

_LOOPBACK = "127.0.0.1"


def _address(
    _ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[str, int] | None:
    """Parse ``ADDR:PORT``, or ``PORT`` of the loopback."""
    if value is None:
        return None
    address, _colon, port = value.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise click.BadParameter(f"{value!r} is not ADDR:PORT", param=param)
    return address.removeprefix("[").removesuffix("]") or _LOOPBACK, int(port)


@page(
    examples=[
        ("Now, as Prometheus would read it:", "criuctl metrics"),
        (
            "For node_exporter, from cron:",
            "* * * * * criuctl metrics --textfile /var/lib/node-exporter/criuctl.prom",
        ),
        ("For Prometheus on this host:", "criuctl metrics --listen 127.0.0.1:9638"),
    ],
    exits=[9, 13],
    see_also=["events", "doctor", "list"],
)
@click.option(
    "--textfile",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file (NAME.prom, mode 0644), whole or not at all.  [default: print]",
)
@click.option(
    "--listen",
    metavar="ADDR:PORT",
    callback=_address,
    help=(
        "Serve /metrics over HTTP until a signal comes; without ADDR on 127.0.0.1, with port 0 on "
        "any.  [default: print]"
    ),
)
@pass_app
def metrics(app: App, textfile: Path | None, listen: tuple[str, int] | None) -> int:
    """Print metrics in the text format of Prometheus: sessions by state, each session's
    checkpoints, bytes, newest checkpoint and its age, how long its last dump froze it; operations
    by exit code, connections by outcome, when gc last ran; whether the store answers.

    Counters come from the event log of this host (criuctl events). The store is listed once; if it
    does not answer within eight seconds, criuctl_store_up is 0 and the rest is still printed, with
    exit status 0. At most 500 sessions have their own figures.

    All clients that can reach the port can read the names of sessions; there is no password. --json
    prints an array of metrics.
    """
    if textfile is not None and listen is not None:
        raise click.UsageError("--textfile and --listen exclude each other")
    need("metrics", "prometheus_client")
    from ...ops import metrics as ops

    if listen is not None:
        if app.json:
            raise click.UsageError("--listen has no JSON")
        return _serve(app, *listen)
    found = ops.look(app.config)
    if textfile is not None:
        ops.write(found, textfile)
    body = [
        {
            "name": metric.name,
            "type": metric.type,
            "help": metric.documentation,
            "samples": [
                {"name": s.name, "labels": s.labels, "value": s.value} for s in metric.samples
            ],
        }
        for metric in found
    ]
    app.emit(body, lambda: "" if textfile is not None else ops.text(found).rstrip("\n"))
    return 0


def _serve(app: App, address: str, port: int) -> int:
    from ...ops.metrics import Server

    server = Server(app.config, address, port)
    try:
        tell(f"criuctl: metrics are served at {server.url}")
        while True:
            signal.pause()
    finally:
        server.close()

"""Metrics for Prometheus: what runs here, its checkpoints in the store, and the outcomes of this
host's operations.

`gather` looks once: at the records of this host's sessions (no holder is asked), at the event log
(`eventlog.EventLog.tally`, so counters survive reboots and never fall when old events are removed),
and at the store, by one listing within `PATIENCE`. A store that does not answer by then costs only
its own figures: ``criuctl_store_up`` is 0. `families` turns the figures into metrics and has no
side effects.

Names follow Prometheus: base units, ``_total`` for counters, ``_timestamp_seconds`` for moments.
The only labels that can grow are the names of sessions, at most `SESSIONS` of them: those with the
newest checkpoints; ``criuctl_sessions_left_out`` counts the others. prometheus_client makes text,
files and HTTP.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from .. import __version__
from ..checkpoint.summary import CheckpointSummary
from ..config import Config
from ..errors import Conflict, CriuctlError, PlatformError, UsageError
from ..host.journal.event_log import EventLog
from ..host.journal.tally import Tally
from ..host.registry import Registry
from .inspect import list_checkpoints
from .metrics_server import Port
from .sessions import sessions

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

SESSIONS = 500
PATIENCE = 8.0  # seconds for the store; Prometheus gives up after ten
STATES = ("running", "paused", "checkpointed", "exited", "lost")
_FRESH = 1.0  # seconds for which one result serves all clients
_ATTEMPTS, _TIMEOUT = 2, 3.0  # requests to an S3 server


class Figures(Struct, frozen=True):
    """The collected data."""

    now: float
    states: Mapping[str, str] = field(default_factory=dict)  # session of this host -> state
    epochs: Mapping[str, int] = field(default_factory=dict)  # session -> epoch of this home's lease
    tally: Tally | None = None  # None: the event log cannot be read
    checkpoints: Sequence[CheckpointSummary] | None = None  # None: the store does not answer
    unreadable: int = 0
    store_seconds: float = 0.0


class Looker:
    """Collects data on request, but never lists the store twice at a time: a hanging store is not
    asked again meanwhile.
    """

    def __init__(self, config: Config, patience: float = PATIENCE) -> None:
        self._config = config
        self._patience = patience
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._last: Figures | None = None

    def gather(self) -> Figures:
        """Return the current figures."""
        with self._lock:
            if self._last is None or not 0 <= time.time() - self._last.now < _FRESH:
                self._last = self._look()
            return self._last

    def _look(self) -> Figures:
        states = {body["session"]: body["state"] for body in sessions(self._config)}
        epochs = {}
        for record in Registry(self._config).all():
            if record.leases:
                epochs[record.name] = max(
                    int(claimed.get("epoch", 0)) for claimed in record.leases.values()
                )
        tally: Tally | None = None
        with suppress(OSError):
            tally = EventLog(self._config.state_dir).tally()
        began = time.monotonic()
        found, unreadable = self._ask_store()
        return Figures(
            time.time(), states, epochs, tally, found, unreadable, time.monotonic() - began
        )

    def _ask_store(self) -> tuple[list[CheckpointSummary] | None, int]:
        if self._asking is not None and self._asking.is_alive():
            return None, 0
        answer: list[tuple[list[CheckpointSummary], int]] = []

        def ask() -> None:
            brief = self._config.with_options(
                s3_retries=min(self._config.s3_retries, _ATTEMPTS),
                s3_timeout=min(self._config.s3_timeout, _TIMEOUT),
            )
            with suppress(CriuctlError, OSError):
                listing = list_checkpoints(brief)
                answer.append((listing.checkpoints, len(listing.unreadable)))

        self._asking = threading.Thread(target=ask, name="criuctl-metrics-store", daemon=True)
        self._asking.start()
        self._asking.join(self._patience)
        return answer[0] if answer else (None, 0)


# -- metrics


def families(figures: Figures) -> Iterator[Metric]:
    """Return the figures as metrics."""
    kept, left_out = _sessions(figures)
    epochs = {name: epoch for name, epoch in figures.epochs.items() if name in kept}
    states = dict.fromkeys(STATES, 0) | Counter(figures.states.values())
    tally = figures.tally
    yield _gauge("criuctl_build_info", "The criuctl that says this.", {__version__: 1}, "version")
    yield _gauge("criuctl_sessions", "Sessions that this host knows, by state.", states, "state")
    yield _gauge(
        "criuctl_sessions_left_out",
        "Sessions that are too many to have figures of their own.",
        left_out,
    )
    yield _gauge(
        "criuctl_session_lease_epoch",
        "Epoch by which this host holds, or held, the session.",
        epochs,
        "session",
    )
    yield from _of_store(figures, kept)
    yield _gauge(
        "criuctl_event_log_up",
        "Whether the event log, which has the counters, can be read.",
        tally is not None,
    )
    if tally is not None:
        yield from _of_events(tally, kept)


def _of_store(figures: Figures, kept: set[str]) -> Iterator[Metric]:
    found = figures.checkpoints
    yield _gauge("criuctl_store_up", "Whether the store could be listed.", found is not None)
    yield _gauge("criuctl_store_list_seconds", "How long that took.", figures.store_seconds)
    if found is None:
        yield from _of_session_ages(
            figures, {name: _seconds(at) for name, at in _dumped(figures).items() if name in kept}
        )
        return
    yield _gauge("criuctl_store_checkpoints", "Checkpoints in the store, of all hosts.", len(found))
    yield _gauge(
        "criuctl_store_unreadable_checkpoints",
        "Checkpoints whose manifests cannot be read.",
        figures.unreadable,
    )
    groups: dict[str, list[CheckpointSummary]] = {}
    for one in found:
        if one.session in kept:
            groups.setdefault(one.session, []).append(one)
    last = {name: max(group, key=lambda s: (s.created, s.number)) for name, group in groups.items()}
    yield from _of_session_ages(
        figures, {name: _seconds(one.created) for name, one in last.items()}
    )

    def of_session(name: str, what: str, values: Mapping[str, float]) -> Metric:
        return _gauge(f"criuctl_session_{name}", what, values, "session")

    def of_last(key: str) -> dict[str, float]:
        return {name: one.bytes.get(key, 0) for name, one in last.items()}

    stored = {
        name: sum(one.bytes.get("stored", 0) for one in group) for name, group in groups.items()
    }
    yield of_session(
        "checkpoints",
        "Checkpoints of the session in the store.",
        {n: len(g) for n, g in groups.items()},
    )
    yield of_session(
        "stored_bytes", "Bytes that the session's checkpoints added to the store.", stored
    )
    yield of_session(
        "last_checkpoint_memory_bytes",
        "Memory in the session's newest checkpoint.",
        of_last("memory"),
    )
    yield of_session(
        "last_checkpoint_new_bytes", "Bytes of it that the store did not have.", of_last("new")
    )
    yield of_session(
        "last_checkpoint_stored_bytes",
        "The same, compressed: what it added to the store.",
        of_last("stored"),
    )


def _of_session_ages(figures: Figures, made: Mapping[str, float]) -> Iterator[Metric]:
    """Add ages while the store does not answer too: this host's dumps are in the event log, and an
    alert must not be cleared.
    """
    name = "criuctl_session_last_checkpoint"
    ages = {session: max(0.0, figures.now - at) for session, at in made.items()}
    yield _gauge(
        f"{name}_timestamp_seconds",
        "When the session's newest checkpoint was made.",
        made,
        "session",
    )
    yield _gauge(
        f"{name}_age_seconds", "How old the session's newest checkpoint is.", ages, "session"
    )


def _dumped(figures: Figures) -> dict[str, str]:
    """Return when this host last dumped each session."""
    return (
        {name: str(last.get("time", "")) for name, last in figures.tally.dumps.items()}
        if figures.tally is not None
        else {}
    )


def _of_events(tally: Tally, kept: set[str]) -> Iterator[Metric]:
    def of_last(key: str) -> dict[str, float]:
        known = ((name, last.get(key)) for name, last in tally.dumps.items() if name in kept)
        return {name: value / 1000 for name, value in known if isinstance(value, int | float)}

    counts = {
        (operation, code): count
        for operation, codes in tally.operations.items()
        for code, count in codes.items()
    }
    succeeded = {operation: _seconds(at) for operation, at in tally.succeeded.items()}
    ended = "Operations by how they ended: exit codes 0 and 11 are successes."
    outcomes = "Connections of restored trees, by outcome."
    yield _gauge(
        "criuctl_session_last_frozen_seconds",
        "How long its last dump froze it.",
        of_last("frozen_ms"),
        "session",
    )
    yield _gauge(
        "criuctl_session_last_dump_seconds",
        "How long its last dump took.",
        of_last("total_ms"),
        "session",
    )
    yield _counter("criuctl_operations", ended, counts, "operation", "exit_code")
    yield _counter(
        "criuctl_operation_seconds", "Time that operations took.", tally.seconds, "operation"
    )
    yield _gauge(
        "criuctl_operation_last_success_timestamp_seconds",
        "When it last succeeded.",
        succeeded,
        "operation",
    )
    yield _counter("criuctl_restored_connections", outcomes, tally.connections, "outcome")
    yield _counter(
        "criuctl_stored_bytes", "Bytes that dumps of this host added to stores.", tally.stored
    )
    yield _counter(
        "criuctl_freed_bytes", "Bytes that collections by this host gave back.", tally.freed
    )
    yield _gauge("criuctl_events_last_sequence", "The number of the newest event.", tally.seq)


def _sessions(figures: Figures) -> tuple[set[str], int]:
    """Return the sessions that have their own figures, and the number of the others."""
    dumped = _dumped(figures)
    newest = {name: dumped.get(name, "") for name in figures.states}
    if figures.checkpoints is None:
        newest |= dumped
    for one in figures.checkpoints or ():
        newest[one.session] = max(newest.get(one.session, ""), one.created)
    kept = sorted(newest, key=lambda name: (newest[name], name), reverse=True)[:SESSIONS]
    return set(kept), len(newest) - len(kept)


# one, or by the text of the label, or by the texts of the labels
Values = float | Mapping[Any, float]


def _gauge(name: str, what: str, values: Values, *labels: str) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(name, what, labels=labels), values)


def _counter(name: str, what: str, values: Values, *labels: str) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(name, what, labels=labels), values)


def _filled(family: Any, values: Values) -> Metric:
    for key, value in sorted((values if isinstance(values, Mapping) else {(): values}).items()):
        family.add_metric([key] if isinstance(key, str) else key, float(value))
    made: Metric = family
    return made


def _seconds(moment: str) -> float:
    """Return the seconds of an RFC 3339 time; 0 for an invalid one."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0


# -- giving them away


class _Live:
    """Collects on every request."""

    def __init__(self, looker: Looker) -> None:
        self._looker = looker

    def collect(self) -> Iterator[Metric]:
        yield from families(self._looker.gather())


class _Seen:
    """Data that was collected before."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _registry(collector: _Live | _Seen) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def look(config: Config) -> list[Metric]:
    """Return all current metrics."""
    return list(families(Looker(config).gather()))


def text(metrics: Sequence[Metric]) -> str:
    """Return the text format of the exposition."""
    from prometheus_client import generate_latest

    return generate_latest(_registry(_Seen(metrics))).decode()


def write(metrics: Sequence[Metric], path: Path) -> None:
    """Write the text to `path`, atomically, for node_exporter's textfile collector.

    The folder may belong to another user, the collector's: no path is used that could lead
    elsewhere by then.
    """
    body = text(metrics).encode()
    try:
        # a rename would replace it: /dev/null, for example
        if path.exists() and not path.is_file():
            raise UsageError(
                f"{path} is no regular file", hint="Name a file in a folder that is there."
            )
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o644)
                file.write(body)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise PlatformError(
            f"{path} cannot be written: {error.strerror}",
            hint="Name a file in a folder that is there.",
        ) from error


class Server:
    """Serves the metrics over HTTP until it is closed."""

    def __init__(self, config: Config, address: str, port: int) -> None:
        """Listen; raise `Conflict` when the port is taken, `UsageError` when the address is not
        this host's.
        """
        from prometheus_client import make_wsgi_app

        try:
            self._server = Port(address, port, make_wsgi_app(_registry(_Live(Looker(config)))))
        except OSError as error:  # gaierror is one
            if error.errno == errno.EADDRINUSE:
                raise Conflict(
                    f"port {port} of {address} is taken",
                    hint="Choose another: --listen 127.0.0.1:PORT.",
                ) from error
            raise UsageError(f"{address}:{port} cannot be listened at: {error.strerror}") from error
        self.port = self._server.server_port
        shown = f"[{address}]" if ":" in address else address
        self.url = f"http://{shown}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

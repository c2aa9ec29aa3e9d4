"""Microsoft Azure: Scheduled Events.

Each request has ``Metadata: true`` and an ``api-version``. The document lists the events of all
machines of an availability or scale set; those that name this machine count, by the name that the
service itself gives it. The first request of a machine may take two minutes, because it turns the
service on. Events that leave the memory alone (``Freeze``) do not count.

An event begins at its ``NotBefore``, or as soon as it is acknowledged (``StartRequests``). That
speaks for every machine that it names, so only an event of this machine alone is acknowledged.
"""

from __future__ import annotations

import json
from typing import Any

from .metadata import Answer, Metadata, MetadataUnavailable
from .notices import Notice, moment, object_in, word

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_FIRST_SECONDS = 130.0  # for the first answer of all
_SECONDS = 10.0
_PROBE_SECONDS = 2.0
_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")


class Azure:
    """See the module's docstring."""

    name = "azure"
    window = 30.0
    pause = 1.0

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._own = ""
        self._answered = False
        self._alone: set[str] = set()  # events that name no other machine

    def present(self) -> bool:
        """Return whether the service gives this machine a name."""
        try:
            return bool(self._name(_PROBE_SECONDS))
        except MetadataUnavailable:
            return False

    def look(self) -> Notice | None:
        """Return the first event that ends this machine's memory."""
        seconds = _SECONDS if self._answered else _FIRST_SECONDS
        body = object_in(self._get(_EVENTS, seconds).text, "scheduled events")
        self._answered = True
        self._alone = set()
        events = body.get("Events")
        notices = [self._notice(event) for event in events] if isinstance(events, list) else []
        found = [notice for notice in notices if notice is not None]
        return min(found, key=lambda notice: notice.at or 0.0, default=None)

    def acknowledge(self, notice: Notice) -> bool:
        """Let the event begin; return False if it also names other machines."""
        if notice.id not in self._alone:
            return False
        body = json.dumps({"StartRequests": [{"EventId": notice.id}]}).encode()
        headers = {**_HEADERS, "Content-Type": "application/json"}
        answer = self._metadata.ask(
            _EVENTS, method="POST", headers=headers, body=body, seconds=_SECONDS
        )
        if answer.status != 200:
            raise MetadataUnavailable(f"the acknowledgement was answered {answer.status}")
        return True

    def _notice(self, event: Any) -> Notice | None:
        if not isinstance(event, dict) or event.get("EventType") not in _ENDS:
            return None
        named = event.get("Resources")
        machines = (
            [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
        )
        own = self._name()
        if own.lower() not in [name.lower() for name in machines]:
            return None
        key = word(event.get("EventId"), "")
        if key and machines == [machines[0]]:
            self._alone.add(key)
        action = str(event["EventType"]).lower()
        # no longer given once it has begun
        at = moment(event.get("NotBefore"))
        return Notice(self.name, "interruption", key or action, action, self.window, at)

    def _name(self, seconds: float = _SECONDS) -> str:
        if not self._own:
            self._own = word(self._get(_NAME, seconds).text, "")
            if not self._own:
                raise MetadataUnavailable("the metadata service gives this machine no name")
        return self._own

    def _get(self, path: str, seconds: float) -> Answer:
        answer = self._metadata.ask(path, headers=_HEADERS, seconds=seconds)
        if answer.status != 200:
            raise MetadataUnavailable(
                f"the metadata service answers {answer.status} to {path.partition('?')[0]}"
            )
        return answer

"""Google Compute Engine: preemptions, and maintenance that ends the machine.

Each request has ``Metadata-Flavor: Google``, and so has each answer of the real service. A look
waits for a change of ``instance/preempted`` for some seconds (``wait_for_change`` with the ETag of
the last answer), so a preemption is seen at once; its thirty seconds have begun by then. A
``maintenance-event`` that terminates comes 60 seconds ahead; a live migration needs nothing.
"""

from __future__ import annotations

import re

from .metadata import Answer, Metadata, MetadataUnavailable
from .notices import Notice

_INSTANCE = "/computeMetadata/v1/instance"
_FLAVOR = "Metadata-Flavor"
_WAIT = 5  # seconds for a change
_MAINTENANCE_WINDOW = 60.0
_ETAG = re.compile(r"[0-9A-Za-z_-]{1,64}")


class Gcp:
    """See the module's docstring."""

    name = "gcp"
    window = 30.0
    pause = 0.0  # the look itself waits

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._etag = ""

    def present(self) -> bool:
        """Return whether the service answers as Google's."""
        try:
            self._get("preempted")
        except MetadataUnavailable:
            return False
        return True

    def look(self) -> Notice | None:
        """Return the preemption or the maintenance that is announced."""
        if self._get("maintenance-event").text.upper() == "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice(
                self.name, "interruption", "maintenance", "terminate", _MAINTENANCE_WINDOW
            )
        query = (
            f"?wait_for_change=true&last_etag={self._etag}&timeout_sec={_WAIT}"
            if self._etag
            else ""
        )
        answer = self._get(f"preempted{query}", _WAIT + 5.0 if query else 2.0)
        if answer.text.upper() == "TRUE":
            self._etag = ""  # it has changed for the last time
            return Notice(self.name, "interruption", "preempted", "preempt", self.window)
        etag = answer.headers.get("etag", "").strip('"')
        self._etag = etag if _ETAG.fullmatch(etag) else ""
        return None

    def acknowledge(self, _notice: Notice) -> bool:
        """Do nothing: the time is fixed."""
        return False

    def _get(self, key: str, seconds: float = 2.0) -> Answer:
        answer = self._metadata.ask(
            f"{_INSTANCE}/{key}", headers={_FLAVOR: "Google"}, seconds=seconds
        )
        if answer.headers.get(_FLAVOR.lower()) != "Google" or answer.status != 200:
            self._etag = ""
            raise MetadataUnavailable(
                f"the metadata service does not answer as Google's does ({answer.status})"
            )
        return answer

"""Amazon EC2: spot interruptions and rebalance recommendations.

By IMDSv2: a token is got by PUT and sent with each request; a request without a valid one is
answered 401. Both documents are answered 404 while there is none. An interruption comes two minutes
ahead; a hibernation begins at once, its notice counts nevertheless.
"""

from __future__ import annotations

import time

from .metadata import Metadata, MetadataUnavailable
from .notices import Notice, moment, object_in, word

_TOKEN = "/latest/api/token"
_TTL = 21600  # seconds
_INTERRUPTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Aws:
    """See the module's docstring."""

    name = "aws"
    window = 120.0
    pause = 5.0  # as Amazon recommends

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token, self._renew_at = "", 0.0

    def present(self) -> bool:
        """Return whether a token is given here: no other cloud does that."""
        try:
            self._new_token()
        except MetadataUnavailable:
            return False
        return True

    def look(self) -> Notice | None:
        """Return the interruption that is announced, else the recommendation."""
        found = self._get(_INTERRUPTION)
        if found is not None:
            body = object_in(found, "interruption notice")
            action = word(body.get("action"), "terminate")
            at = moment(body.get("time"))
            return Notice(self.name, "interruption", f"{action} {at}", action, self.window, at)
        found = self._get(_REBALANCE)
        if found is not None:
            at = moment(object_in(found, "recommendation").get("noticeTime"))
            return Notice(self.name, "rebalance", f"rebalance {at}", "rebalance", self.window)
        return None

    def acknowledge(self, _notice: Notice) -> bool:
        """Do nothing: the time is fixed."""
        return False

    def _get(self, path: str) -> str | None:
        if not self._token or time.monotonic() >= self._renew_at:
            self._new_token()
        answer = self._metadata.ask(path, headers={"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:  # it has expired, for example because the machine stood still
            self._new_token()
            answer = self._metadata.ask(path, headers={"X-aws-ec2-metadata-token": self._token})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise MetadataUnavailable(f"the metadata service answers {answer.status} to {path}")
        return answer.text

    def _new_token(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TTL)}
        answer = self._metadata.ask(_TOKEN, method="PUT", headers=headers)
        token = word(answer.text, "")
        if answer.status != 200 or not token.isascii() or not token:
            raise MetadataUnavailable(
                f"the metadata service gives no token ({answer.status})",
                hint="Is it enabled for this instance, with a hop limit that suits containers?",
            )
        self._token, self._renew_at = token, time.monotonic() + _TTL / 2

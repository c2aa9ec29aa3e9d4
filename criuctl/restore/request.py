"""What a restore is asked for."""

from __future__ import annotations

from msgspec import Struct

from ..checkpoint import leases
from ..files.judgement import Policy


class RestoreRequest(Struct, frozen=True, kw_only=True):
    """The options of a restore, as its caller gives them."""

    new_name: str | None = None  # of a copy; None: the session itself comes back
    pids: str = "auto"  # auto | same | private
    # the policy for all of them; None: the checkpoint's and the configured rules
    connections: str | None = None
    connections_deadline: float | None = None  # seconds for connections to be back
    files: Policy | None = None  # for changed files; None: the configuration's
    lazy: bool | None = False  # memory follows while the tree runs; None: where it is worth it
    dry_run: bool = False  # return the plan
    force: bool = False  # also when it is stale (`criuctl.files.predicates`)
    older: bool = False  # also when this host knows of a newer checkpoint
    alone: bool = False  # for a trial, in a network of its own, stale or not
    take_over: bool = False  # also when another host has the session's lease
    returning: bool = False  # maintenance brings it back: the door may be shut
    instead_of: leases.Head | None = None  # a lease that has run out
    ttl: int = 0  # milliseconds that the lease lasts without being renewed; 0: for good
    again: bool = True  # once more where a PID or a terminal was taken at the last moment

    @property
    def copy(self) -> bool:
        """Whether the original may live."""
        return self.new_name is not None

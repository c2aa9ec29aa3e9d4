"""The request for a restore."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ..checkpoint import leases
from ..criu.tenant import Tenant
from ..files.judgement import Policy
from .relocation import Relocation


class RestoreRequest(Struct, frozen=True, kw_only=True):
    """The options of a restore, as its caller gives them."""

    new_name: str | None = None  # of a copy; None: the session itself is restored
    forked_from: str = ""  # a copy made by `fork`: of this session
    ends: float | None = None  # when its holder ends it, in Unix seconds
    relocation: Relocation | None = None  # where it finds the folder that it works in
    pids: str = "auto"  # auto | same | private
    # the policy for all of them; None: the checkpoint's and the configured rules
    connections: str | None = None
    connections_deadline: float | None = None  # seconds for connections to be back
    files: Policy | None = None  # for changed files; None: the configuration's
    rewind: bool = False  # the workspace, too, becomes what it was (`criuctl.files.rewind`)
    share_files: bool = False  # a copy writes to the files of its original (`own_files.share`)
    lazy: bool | None = False  # memory follows while the tree runs; None: where it is worth it
    dry_run: bool = False  # return the plan
    force: bool = False  # also when it is stale (`criuctl.files.predicates`)
    older: bool = False  # also when this host knows of a newer checkpoint
    alone: bool = False  # for a trial, in a network of its own, stale or not
    take_over: bool = False  # also when another host holds the session's lease
    returning: bool = False  # restored by maintenance: the host may be closed
    instead_of: leases.Head | None = None  # a lease that has run out
    ttl: int = 0  # milliseconds that the lease lasts without renewal; 0: without end
    group: str = ""  # restored together with the other members of this group
    network: str = ""  # path of the net namespace that was made for the members of its group
    more_tries: int = 2  # if a PID or a terminal is taken at the last moment
    tenant: Tenant | None = None  # whose tree it must be, all of it; None: anyone's
    # control groups (hierarchy -> path) that the tree is made in; none: those of the dump
    groups: Mapping[str, str] = field(default_factory=dict)
    # descriptors for ends of pipes to outside the tree, by CRIU's key: ``pipe:[NUMBER]``
    streams: Mapping[str, int] = field(default_factory=dict)

    @property
    def copy(self) -> bool:
        """Return whether this makes a copy, next to which the original may run."""
        return self.new_name is not None

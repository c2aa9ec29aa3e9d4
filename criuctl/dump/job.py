"""What a dump is asked for, and what it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from ..config import Config
from ..criu.tenant import Tenant
from ..host.group_member import DumpedMember
from ..proc.tree import ProcessIdentity
from ..report import Reporter


class DumpRequest(Struct, frozen=True, kw_only=True):
    """The options of a dump, as its caller gives them."""

    # of the session; None: the one that the tree has, or one after its command
    name: str | None = None
    leave_running: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    with_files: Sequence[str] = ()
    with_workspace: bool = False  # the session's workspace, for `restore --rewind`
    connections: str | None = None  # the policy for all of them; None: the configured rules
    drain: float = 0.0  # seconds to wait for connections to become idle
    precopy: bool = False
    # writes are tracked until the next snapshot, which reads only what was written to
    keep_tracking: bool = False
    carry_binaries: bool = False
    require: Sequence[str] = ()  # predicates that must hold, now and at a restore
    max_freeze: float | None = None  # seconds; 0: no bound; None: the configuration's
    streams: Sequence[str] = ()  # pipes (``pipe:[N]``) whose other end a restore is given again
    tenant: Tenant | None = None  # whose tree it must be, all of it; None: anyone's


class DumpJob(Struct, frozen=True):
    """One dump: its configuration, the tree's root and the request."""

    config: Config
    reporter: Reporter
    request: DumpRequest
    root: ProcessIdentity
    began: float  # monotonic
    max_freeze: float  # seconds; 0: no bound
    moves: bool = False  # the tree goes to another host, which stores the checkpoint
    group: DumpedMember | None = None  # it is dumped together with others

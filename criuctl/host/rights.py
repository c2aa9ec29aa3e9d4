"""Which right each operation on a session needs, and the check.

RULE: an operation checks the right itself, so that it holds for every door: the command line, the
Python API, MCP, ACP, the page, a share. A door checks nothing and knows no role.

The operator that asks is the actor of the thread or the command line's (`session.client.caller`).
What it may do at most in a session is set there by an admin (``criuctl role``): the holder's state
file says so, and where this host has none, the session's checkpoint.

``observe`` reads, ``write`` types and makes copies, and changes nothing else; ``admin`` ends the
session, moves it, or removes what is stored of it. Requests to a holder are checked a second time
by the holder, whose operations have the same three roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ..config import Config
from ..errors import Forbidden
from ..quoting import quoted
from ..session.client import caller
from ..session.names import valid_name
from ..session.protocol import ROLES
from ..session.roles import Ceilings, ceiling, lower, of_status
from ..session.sessions import state_of

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest  # slow to import

Right = Literal["observe", "write", "admin"]

_READING: tuple[str, ...] = (
    *("attach --read-only", "capture", "checkpoints", "connections", "diff", "lease show", "list"),
    *("log", "ls", "output", "restore --dry-run", "share list", "share open --role observe"),
    *("show", "status", "step list", "step show", "top", "verify", "wait"),
)
_WRITING: tuple[str, ...] = (
    *("attach", "cp", "exec", "export", "fork", "halt", "kill --command", "lease request"),
    *("lease yield", "pause", "pin", "restore", "restore --as", "resume", "run", "send"),
    *("share open --role write", "share revoke", "signal", "snapshot", "step resolve"),
    *("step run", "trial"),
)
_GOVERNING: tuple[str, ...] = (
    *("attach --take", "dump", "forget", "kill", "lease take", "migrate", "migrate --resolve"),
    *("resume --agent-stays-out", "rm", "role", "supervise", "unpin"),
)
RIGHTS: Mapping[str, Right] = {
    **dict.fromkeys(_READING, "observe"),
    **dict.fromkeys(_WRITING, "write"),
    **dict.fromkeys(_GOVERNING, "admin"),
}
Roles = Iterable[Sequence[str]]  # (kind, name, role), as a checkpoint has them


def check(
    config: Config, operation: str, session: str, stored: Callable[[], Roles] | None = None
) -> None:
    """Raise `Forbidden` if the operator that asks may not do `operation` to the session.

    `stored` returns the roles of the session's checkpoint; it is called where no holder of the
    session has left a state here.
    """
    right = RIGHTS[operation]
    allowed = lower(right, caller.capped("admin"))
    kind, name = caller.identity()
    limited = ""
    if allowed == right and right != "observe":
        highest = ceiling(_ceilings(config, session, stored), kind, name)
        if lower(right, highest) != right:
            allowed = highest
            limited = (
                f"It was limited: `criuctl role {quoted(session)} {quoted(f'{kind}:{name}')} "
                f"{right}` gives it that role."
            )
    if ROLES.index(allowed) < ROLES.index(right):
        raise Forbidden(
            f"{operation} needs the role {right!r} in session {session!r}; {kind} {name!r} has "
            f"{allowed!r}",
            hint=limited,
        )


def roles_of(manifest: Manifest) -> Roles:
    """Return the roles of a checkpoint's session."""
    return manifest.holder.roles if manifest.holder is not None else ()


def _ceilings(config: Config, session: str, stored: Callable[[], Roles] | None) -> Ceilings:
    state = state_of(config, session) if valid_name(session) else None
    if state is not None:
        return of_status(state.get("roles") or ())
    return {} if stored is None else {(kind, name): role for kind, name, role in stored()}

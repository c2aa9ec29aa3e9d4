"""The connections that may use the secret of a rule.

A rule with a ``secret`` makes criuctl, which is root, log in at a peer and hand the connection to a
program. A process's own claims are not enough for that: any user may call a process ``worker1``,
and connect it to a server of that user, which would then get the password. So a secret is used
where one of these holds for every process that has the socket:

- the rule's ``match`` has ``user``, and all its user IDs are among those: these users may know the
  secret;
- all its user IDs are 0;
- the rule's ``match`` names the peer (``peer``, ``host`` or ``path``), and the process is in
  criuctl's own user namespace: otherwise it may be root of a network or mount namespace where that
  address or path is a server of its own.

The last is for configurations that know their servers: a process of any user that connects there is
logged in. `doctor` recommends to name the users. At a restore the credentials that CRIU will give
the processes decide, not those in a manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ..errors import NoSuchProcess
from ..proc.namespaces import namespaces
from ..proc.tree import Process
from .protocols.base import Settings

_ASKING = "ask_secret"  # the option of redis
_ROOT = frozenset({0})


class Owner(Struct, frozen=True):
    """The kernel's data about a process that holds a socket."""

    uids: frozenset[int]  # real, effective, saved, file system
    other_userns: bool = False  # in another user namespace than criuctl


UNKNOWN = Owner(frozenset({-1}), other_userns=True)


class Terms(Struct, frozen=True):
    """A rule's conditions for the use of its secret."""

    users: tuple[int, ...] = ()  # of its match; empty: not given
    pinned: bool = False  # its match names the peer


def of_tree(tree: Sequence[Process]) -> dict[int, Owner]:
    """Return the owners in a live tree, by the PIDs that its records use; processes that have just
    ended are left out.
    """
    ours = namespaces("self").get("user")
    found = {}
    for process in tree:
        if not process.zombie:
            with suppress(NoSuchProcess):
                found[process.ns_pid] = Owner(
                    frozenset(process.uids), namespaces(process.pid).get("user") != ours
                )
    return found


def has_secret(settings: Settings) -> bool:
    """Return whether a rule refers to a secret: its own, or one to ask the server with."""
    return bool(settings.secret) or _ASKING in settings.options


def without_secret(settings: Settings) -> Settings:
    """Return a rule's settings without the references to secrets."""
    return replace(
        settings, secret={}, options={k: v for k, v in settings.options.items() if k != _ASKING}
    )


def may_have(terms: Terms, owners: Iterable[Owner]) -> bool:
    """Return whether processes of `owners` may use the secret; False if nothing is known of
    them.
    """
    known = list(owners)
    if terms.users:
        return bool(known) and all(owner.uids <= set(terms.users) for owner in known)
    if known and all(owner.uids == _ROOT for owner in known):
        return True
    return terms.pinned and not any(owner.other_userns for owner in known)


def refusal(rule: str, owners: Iterable[Owner]) -> str:
    """Return why a connection is not reconnected by this rule, and the remedy."""
    uids = sorted({uid for owner in owners for uid in owner.uids})
    whose = f"of user {', '.join(map(str, uids))}" if uids else "of a user that is not known"
    return (
        f"{rule} has a secret, which is not lent to a process {whose}: let its match name the user"
        " (user: NAME), or the peer of a process in this host's own user namespace (peer, host or "
        "path)"
    )

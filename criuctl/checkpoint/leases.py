"""The session head: the host that a session lives on, agreed upon through the store.

A session's head is the newest of the records ``sessions/<token>/<20-digit sequence>``. Each is a
small sealed object, put once by `put(if_absent=True)` under the next sequence number and never
changed. When several hosts want to be the session's home, exactly one wins and the others get its
name. A record holds a random nonce; after a lost answer the store is asked whose record is there.

    held      the session lives on `host`, or is being restored there
    released  it lives nowhere, and the first host to claim it gets it; `ended` says that the
              session is over, so that it is not waited for

A claim raises the *epoch*. A host may take over what it holds itself, for example after a restart
in the middle of a restore. Taking a session from a host that seems dead is a decision for a person
(``restore --take-over``). A take-over that fails is undone: the former host holds the session
again, by its old epoch. A take-over also replaces a newest record that is damaged, by an epoch that
its home cannot have (`heads.standing`). A home may `pass_on` what it holds, which is how a
migration ends. `criuctl.host.fencing` handles a home that finds a higher epoch than its own.

A lease expires only if its home has said so. `renew` puts the same claim again, with one more
`beat` and the seconds (`ttl`) after which it may be taken if no further beat is seen. No clocks are
compared: a watching host counts those seconds by its own clock, from when it first saw that beat,
and takes over exactly the record that it watched (``claim(instead_of=...)``). Both are puts under
the next number, so either the home's next beat or the take-over wins, never both.

A write-only host seals its leases in its own domain, and cannot read those of others. If it cannot
read a session's newest record, it knows only that another host wrote it. So it neither claims nor
renews nor releases that session, and writes nothing: `Conflict`.

On a store without conditional writes no such guarantee is possible. A claim there is a marker
without a lease, and `Claim.warning` says so.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from ..errors import Conflict, CriuctlError, DataError, StoreDenied, StoreError, StoreFull
from .heads import ATTEMPTS, Head, clear, put_record, read_head, read_record, record_name, standing
from .manifest import SessionRef, now

if TYPE_CHECKING:
    from .repository import Repository

UNLEASED = (
    "the store has no conditional writes, so nothing keeps another host from restoring this "
    "session at the same time"
)


class Claim:
    """A session claimed for this host. `release` gives it back, unless the restore succeeded
    (`keep`).
    """

    def __init__(
        self,
        repository: Repository,
        head: Head,
        *,
        leased: bool,
        taken: Head | None = None,
        refused: str = "",
    ) -> None:
        self._repository = repository
        self.head = head
        self._taken = taken  # the record before this claim: another host's, or a released one
        self.leased = leased
        self.refused = refused  # why the store takes no lease at all; "" if it does, or knows none
        self.warning = "" if leased else refused or UNLEASED
        self._done = False

    def keep(self) -> None:
        """Keep the lease: the session lives here now."""
        self._done = True

    def clear(self) -> None:
        """Remove old records of the session, later, when no operation waits for it."""
        if self.leased:
            clear(self._repository, self.head)

    def check(self) -> None:
        """Check that the claim still stands before the session runs; raise `Conflict` if not. An
        unreachable store counts as "not".
        """
        if not self.leased:
            return
        try:
            current = read_head(self._repository, self.head.session.name, self.head)
        except (StoreError, DataError):
            return
        if current is not None and current.epoch > self.head.epoch:
            who = current.host_name or current.host
            raise Conflict(
                f"session {self.head.session.name!r} was taken over by host {who} meanwhile",
                host=who,
            )

    def withdraw(self) -> None:
        """Give back a claim that was not confirmed, if the store shows that it was made."""
        try:
            ours = (
                read_record(self._repository, record_name(self._repository, self.head)).nonce
                == self.head.nonce
            )
        except CriuctlError:
            return
        if ours:
            self.release_unless_kept()

    def release_unless_kept(self) -> None:
        """Give the lease back after a failure. If the store does not allow that, this host can take
        it over later.

        Errors are not raised here: the failure that came first is reported and decides what is done
        next.
        """
        if self._done or not self.leased:
            return
        self._done = True
        try:
            if self._taken is None:
                _release(self._repository, self.head)
            elif not self._taken.host:  # damaged: that record is in force again
                self._repository.store.delete(record_name(self._repository, self.head))
            else:
                held = self._taken.state == "held"
                _follow(
                    self._repository,
                    self.head,
                    self._taken if held else self._taken.with_use(epoch=self.head.epoch),
                )
        except CriuctlError:
            # taken over meanwhile, or still held by this host: either way no host that may claim it
            # is shut out
            return


def claim(
    repository: Repository,
    session: str,
    session_id: str,
    incarnation: int,
    *,
    host: str,
    host_name: str = "",
    take_over: bool = False,
    above: int = 0,
    ttl: int = 0,
    instead_of: Head | None = None,
    copy: bool = False,
    seen: Head | None = None,
) -> Claim:
    """Make this host (`host` is its id) the session's home, with an epoch above `above`; raise
    `Conflict`, which names the holder.

    What `host` holds itself is taken over; with `take_over`, a person's decision, also what another
    host holds; with `instead_of`, exactly that expired lease. The new lease expires after `ttl`
    milliseconds, unless it is renewed. A `copy`, whose name is new, needs no lease where the store
    takes no more writes, such as a backup that is only read. `seen` is the newest record as of just
    now, which is then not read again; if there is a newer one, the put fails.

    Older records are left to `Claim.clear`.
    """
    leased = repository.capabilities.conditional_create
    ref = SessionRef(session, session_id)
    for _attempt in range(ATTEMPTS):
        current = seen or (standing(repository, ref, over_damage=take_over) if leased else None)
        seen = None
        _check_free(session, current, host, take_over=take_over, instead_of=instead_of)
        epoch = max(current.epoch if current else 0, above) + 1
        head = _following(current, ref, host, host_name, incarnation, epoch, "held").with_use(
            ttl=ttl
        )
        if not leased:
            return Claim(repository, head, leased=False)
        # The record to put back if this claim is given up: its holder, or that it was released and
        # whether it has ended.
        taken = current if current is not None and (current.host != host or current.ended) else None
        mine = Claim(repository, head, leased=True, taken=taken)
        try:
            try:
                won = put_record(repository, head)
            except (StoreDenied, StoreFull) as error:
                if not copy:
                    raise
                why = (
                    f"the store takes no lease for session {session!r}, so another host may use "
                    f"that name, too: {error.message}"
                )
                return Claim(repository, head, leased=False, refused=why)
            if won and _in_force(repository, head):
                return mine
        # a signal, for example: the caller does not get the claim, so give it back here
        except BaseException:
            # otherwise it is as it was
            if current is None or (current.state, current.host) != ("held", host):
                mine.withdraw()
            raise
    raise Conflict(f"session {session!r} is being claimed by many at once", hint="Try again.")


def _check_free(
    session: str, current: Head | None, host: str, *, take_over: bool, instead_of: Head | None
) -> None:
    """Raise `Conflict`, which names the holder, if `host` may not have the lease after `current`;
    arguments as for `claim`.
    """
    if instead_of is not None and (current is None or not current.is_beat_of(instead_of)):
        who = current.host_name or current.host if current is not None else "no host"
        raise Conflict(
            f"the lease of session {session!r}, which had run out, has changed: {who} has it now",
            host=who,
        )
    forced = take_over or instead_of is not None
    if current is not None and current.state == "held" and current.host != host and not forced:
        raise Conflict(
            f"session {session!r} is held by host {current.host_name or current.host} since "
            f"{current.time}",
            hint=(
                "End it there; restore a copy with --as NEW-NAME; or, if that host is lost "
                "for good, use --take-over."
            ),
            host=current.host_name or current.host,
        )


def renew(repository: Repository, session: SessionRef, *, host: str, ttl: int) -> Head | None:
    """Renew what `host` holds by one more beat, to expire `ttl` milliseconds later (0: never);
    return the lease as it is then.

    A lease of another host, or a released one, is returned unchanged. Return None where there is no
    lease.
    """
    if not repository.capabilities.conditional_create:
        return None
    for _attempt in range(ATTEMPTS):
        current = read_head(repository, session.name)
        if current is None or (current.state, current.host, current.session) != (
            "held",
            host,
            session,
        ):
            return current
        beat = {"beat": current.beat + 1, "beaten": now(), "ttl": ttl}
        head = current.with_use(**beat, nonce=os.urandom(16).hex(), sequence=current.sequence + 1)
        if put_record(repository, head):
            clear(repository, head)
            return head
    raise Conflict(f"the lease of {session.name!r} changes faster than it can be renewed")


def release(repository: Repository, session: str, *, host: str, seen: Head | None = None) -> bool:
    """Record that the session does not live on `host` any more (its tree was dumped and ended);
    return False if `host` did not hold it.

    `seen` is the newest record as of just now, which is then not read again. But where a supervisor
    renews it, its next numbers may be used, and cleared, by now.
    """
    if not repository.capabilities.conditional_create:
        return False
    current = seen if seen is not None and not seen.ttl else read_head(repository, session)
    if current is None or current.state != "held" or current.host != host:
        return False
    _release(repository, current)
    return True


def end(
    repository: Repository, session: SessionRef, incarnation: int, *, host: str, host_name: str = ""
) -> bool:
    """Record that the session has ended on `host` for good; return False where no such record is
    needed or allowed.

    A session without a lease gets this record only if it has a checkpoint, since otherwise nothing
    suggests that it could come back.
    """
    if not repository.capabilities.conditional_create:
        return False
    current = read_head(repository, session.name)
    if current is not None and (current.state == "held" or current.session.id == session.id):
        if current.ended or (current.host, current.session.id) != (host, session.id):
            return False
        _follow(repository, current, current.with_use(state="released", ended=True, time=now()))
        return True
    if not repository.catalog.names(session.name):
        return False
    epoch = current.epoch if current else 0
    head = _following(current, session, host, host_name, incarnation, epoch, "released")
    return put_record(repository, head.with_use(ended=True))


def pass_on(
    repository: Repository,
    session: SessionRef,
    *,
    from_host: str,
    to_host: str,
    to_name: str,
    incarnation: int,
) -> Head | None:
    """Make `to_host` the home of what `from_host` holds (or of a released session), by the next
    epoch; return None where the store gives no leases.

    Raise `Conflict` when another host has it. When called again after a lost answer it finds its
    own record and returns that.
    """
    if not repository.capabilities.conditional_create:
        return None
    for _attempt in range(ATTEMPTS):
        current = read_head(repository, session.name)
        if current is not None and current.state == "held" and current.host != from_host:
            if (current.host, current.session.id, current.incarnation) == (
                to_host,
                session.id,
                incarnation,
            ):
                return current
            raise Conflict(
                f"session {session.name!r} is held by host {current.host_name or current.host} "
                f"since {current.time}",
                host=current.host_name or current.host,
            )
        epoch = current.epoch + 1 if current else 1
        head = _following(current, session, to_host, to_name, incarnation, epoch, "held")
        if put_record(repository, head) and _in_force(repository, head):
            clear(repository, head)
            return head
    raise Conflict(f"session {session.name!r} is being claimed by many at once", hint="Try again.")


def _following(
    current: Head | None,
    session: SessionRef,
    host: str,
    host_name: str,
    incarnation: int,
    epoch: int,
    state: Literal["held", "released"],
) -> Head:
    """Return a new record that follows `current`."""
    number = current.sequence + 1 if current else 1
    return Head(
        session, host, host_name, incarnation, epoch, state, os.urandom(16).hex(), now(), number
    )


def _in_force(repository: Repository, head: Head) -> bool:
    """Return whether the record that was just put is in force. A process that slept since it read
    the record before may have used a number that was used, and cleared, long ago. The record is
    also read back, because a store that lets two writers win holds one record in the end.
    """
    newest = read_head(repository, head.session.name)
    return newest is not None and (newest.host, newest.epoch) == (head.host, head.epoch)


def _release(repository: Repository, current: Head) -> None:
    _follow(repository, current, current.with_use(state="released", time=now()))


def _follow(repository: Repository, mine: Head, what: Head) -> None:
    """Put `what` as the record after `mine`, or after a later beat of it; raise `Conflict` when
    this host does not hold the session any more.
    """
    current: Head | None = mine
    for _attempt in range(ATTEMPTS):
        if current is None or (current.host, current.epoch, current.state) != (
            mine.host,
            mine.epoch,
            mine.state,
        ):
            break
        head = what.with_use(nonce=os.urandom(16).hex(), sequence=current.sequence + 1)
        if put_record(repository, head):
            clear(repository, head)
            return
        current = read_head(repository, mine.session.name)
    raise Conflict(f"session {mine.session.name!r} was claimed by another host meanwhile")


__all__ = [
    "UNLEASED",
    "Claim",
    "Head",
    "claim",
    "end",
    "pass_on",
    "put_record",
    "read_head",
    "release",
    "renew",
]

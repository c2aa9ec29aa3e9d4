"""Which keys a share lets in.

The one-time key of the invitation opens the share once. The guest's program has made a key of its
own by then, and says which it is in its user name, which the signature of the one-time key covers.
From then on that key, and no other, is let in: so the same guest comes back after a lost
connection, and a copy of the invitation is worth nothing. The key is in the memory of the guest's
program only, and ends with it.
"""

from __future__ import annotations

from hmac import compare_digest

from .invitation import decode


class Admission:
    """The keys of one share."""

    def __init__(self, one_time: bytes) -> None:
        """`one_time` is the public half, 32 bytes."""
        self._one_time = one_time
        self._guest: bytes | None = None

    @property
    def used(self) -> bool:
        """Whether a guest has entered."""
        return self._guest is not None

    def admits(self, user: str, key: bytes) -> bool:
        """Return whether `key` may enter as `user`, if its owner has the private half."""
        try:
            own = decode(user)
        except ValueError:
            return False
        if self._guest is not None:
            return compare_digest(key, self._guest) and compare_digest(own, self._guest)
        return compare_digest(key, self._one_time) and not compare_digest(own, self._one_time)

    def enter(self, user: str, key: bytes) -> bool:
        """Note that the owner of `key` has entered as `user`; False: it is not let in any more."""
        if not self.admits(user, key):
            return False
        self._guest = decode(user)
        return True

"""Which store this host expects at a place: its id, whether it is encrypted, and which master key
it has.

A user who can write to a folder or a bucket can replace the store in it. So, as ssh does with the
keys of hosts, a host records the store that it makes or meets first at a place (`Store.place`), and
refuses a different one there before it reads anything further or writes anything. A pin is one
small file in ``state_dir/stores``, named by a hash of the place.

- `store init` pins the store that it makes; any other command the store that it meets first; `store
  trust` the one there now.
- Compared are the id and the encryption, both as soon as the config is read and before any key is
  looked for, and the fingerprint of the master key once that is known.  Adding, removing and
  rotating keys changes none of them.
- A store in S3 that is not encrypted is never pinned on first use: an attacker on the network path
  could have put it there.
- Two first uses at the same time: the file is made by link(2), so one wins, and the other compares
  its store with that pin.
- Where a plain store is gone, for example because its disk is not mounted, a dump makes another
  plain one in its place, although other stores are encrypted: the former is accepted when it is
  back, and that would make encryption worthless.  An encrypted store is never
  replaced, except by `store init`.
- A pin that cannot be written (a read-only state folder, a user who is not root) leaves the store
  as trusted as it was without pins; the caller reports that.  A pin that exists and cannot be
  understood is an error, never "none".

A pin does not protect a store without encryption from forged contents: its config can be copied.
Only the key does that.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict

from ..config import Config
from ..errors import Damaged, StoreChanged, StoreNotInitialised, StoreNotTrusted
from ..proc.folders import make_private
from ..quoting import quoted
from ..store import Store
from . import keys
from .codec import fingerprint
from .manifest import now

How = Literal["init", "first-use", "trusted"]

_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
_MAX_SIZE = 1 << 16
_FORMER = 8


class Pin(Struct, frozen=True, forbid_unknown_fields=False):
    """The store that is expected at one place."""

    place: str
    id: str
    encrypted: bool
    # fingerprint of the master key; "" while only a write-only host has opened the store
    key: str = ""
    how: How = "first-use"
    since: str = ""
    # ids of plain stores that were pinned here before a plain one was made in their place
    former: tuple[str, ...] = ()

    def description(self) -> str:
        """Describe the pinned store for a message."""
        return f"store {self.id[:12]}, {'encrypted' if self.encrypted else 'not encrypted'}"


class Pinning:
    """The pin of one store's place; made by `of`."""

    def __init__(self, place: str, path: Path, pin: Pin | None, unreadable: str = "") -> None:
        self.place, self.path, self.pin = place, path, pin
        self.unrecorded = unreadable  # why there is no pin although there should be one

    @classmethod
    def of(cls, store: Store, config: Config) -> Pinning:
        """Read the pin that this host has; raise `Damaged` if the file cannot be understood."""
        place = store.place()
        path = _path(place, config)
        try:
            return cls(place, path, _read(path, place) if place else None)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            return cls(place, path, None, f"{path}: {error.strerror}")

    @property
    def remote(self) -> bool:
        """Whether the store is reached over a network."""
        return self.place.startswith("s3:")

    # -- comparing
    # -------------------------------------------------------------------------------------

    def check_config(self, body: dict[str, Any], url: str) -> None:
        """Raise `StoreChanged` unless this config is that of the pinned store, as far as can be
        seen without a key.
        """
        if self.pin is None:
            return
        encrypted = body["encryption"] != "none"
        if body["id"] in self.pin.former and not encrypted and not self.pin.encrypted:
            return  # its disk is mounted again
        if (body["id"], encrypted) != (self.pin.id, self.pin.encrypted):
            found = f"store {body['id'][:12]}, {'encrypted' if encrypted else 'not encrypted'}"
            if body["id"] == self.pin.id:
                found = (
                    "a config of that store which says that it is "
                    f"{'encrypted' if encrypted else 'not encrypted'}"
                )
            raise self._changed(found, url, plain=not encrypted)

    def check_key(self, opened: keys.Opened | None, url: str) -> None:
        """Raise `StoreChanged` unless the key that opened the store is that of the pinned one."""
        if self.pin is not None and (key := _fingerprint(opened)) and self.pin.key not in ("", key):
            raise self._changed(
                f"store {self.pin.id[:12]} with another master key", url, plain=False
            )

    def _changed(self, found: str, url: str, *, plain: bool) -> StoreChanged:
        assert self.pin is not None
        return StoreChanged(
            f"{url} is not the store that it was: this host has pinned {self.pin.description()}, "
            f"since {self.pin.since}, and finds {found}; nothing was read or written",
            hint="Another user may have replaced it: find out before anything is restored from "
            "it or stored in it. If it was replaced on purpose, `criuctl store trust --store "
            f"{quoted(url)}{' --no-encrypt' if plain else ''}` pins the one there now.",
            store=url,
            pinned={"id": self.pin.id, "encrypted": self.pin.encrypted, "since": self.pin.since},
        )

    def gone(self, url: str) -> StoreNotInitialised:
        """Return the error for a place at which there is no store any more."""
        assert self.pin is not None
        return StoreNotInitialised(
            f"the store in {url} is gone: this host has pinned {self.pin.description()}, since "
            f"{self.pin.since}",
            hint=f"Mount what holds it. `criuctl store init --store {quoted(url)}` makes a new "
            "one.",
        )

    def check_plain(self, store_id: str, config: Config, url: str) -> None:
        """Raise `Conflict` for a plain store that this host has no reason to expect, because it is
        not pinned.
        """
        if self.pin is not None:
            return
        keys.refuse_downgrade(store_id, config)
        if self.place and (source := keys.passphrase_source(config)):
            raise StoreNotTrusted(
                f"{url} is not encrypted, this host meets it for the first time, and has a "
                f"passphrase ({source})",
                hint="Another user may have replaced the store. If it is meant to be plain: "
                f"`criuctl store trust --store {quoted(url)} --no-encrypt`.",
                store=url,
            )
        if self.remote:
            raise StoreNotTrusted(
                f"{url} is not encrypted, and this host has neither made it nor pinned it",
                hint="If it is meant to be plain, so that every user of the bucket can read or "
                f"forge checkpoints: `criuctl store trust --store {quoted(url)} --no-encrypt`.",
                store=url,
            )

    # -- recording
    # -------------------------------------------------------------------------------------

    def met(self, store_id: str, opened: keys.Opened | None, *, encrypted: bool, url: str) -> None:
        """Record the store that was opened and proved, unless a pin exists; raise `StoreChanged` if
        a different one was recorded meanwhile.
        """
        key = _fingerprint(opened)
        if self.pin is not None:
            if key and not self.pin.key:
                self.record(store_id, opened, encrypted=encrypted, how=self.pin.how)
            return
        if not self.place or self.unrecorded:
            return
        pin = Pin(self.place, store_id, encrypted, key, "first-use", now())
        try:
            _write(self.path, pin, replace=False)
            self.pin = pin
        except FileExistsError:
            self.pin = _read(self.path, self.place)
            self.check_config(
                {"id": store_id, "encryption": "aes-256-gcm" if encrypted else "none"}, url
            )
            self.check_key(opened, url)
        except OSError as error:
            self._not_written(error)

    def record(
        self, store_id: str, opened: keys.Opened | None, *, encrypted: bool, how: How
    ) -> None:
        """Expect this store from now on, whatever was expected before."""
        if not self.place:
            return
        was = self.pin
        plain = was is not None and not was.encrypted and not encrypted
        former = (
            (*was.former, was.id)[-_FORMER:]
            if was is not None and plain and was.id != store_id
            else ()
        )
        pin = Pin(self.place, store_id, encrypted, _fingerprint(opened), how, now(), former)
        try:
            _write(self.path, pin, replace=True)
            self.pin, self.unrecorded = pin, ""
        except OSError as error:
            self._not_written(error)

    def _not_written(self, error: OSError) -> None:
        if error.errno not in (*_NO_PLACE, errno.ENOSPC, errno.EDQUOT):
            raise error
        self.unrecorded = f"{self.path}: {error.strerror}"


class Trusting(Pinning):
    """The pin of a place that is about to be replaced by the store there now; made by `at`."""

    before: Pin | None = None
    _wanted: str = ""
    _plain: bool = False

    @classmethod
    def at(cls, store: Store, config: Config, store_id: str, *, plain: bool) -> Trusting:
        """Return the pin for a store whose id begins with `store_id`, and which may be `plain`."""
        try:
            known = Pinning.of(store, config)
        except Damaged:  # it is about to be replaced
            known = cls(store.place(), _path(store.place(), config), None)
        made = cls(known.place, known.path, None)
        made.before, made._wanted, made._plain = known.pin, store_id, plain
        return made

    def check_config(self, body: dict[str, Any], url: str) -> None:
        if not body["id"].startswith(self._wanted):
            raise StoreChanged(
                f"{url} is store {body['id']}, not {self._wanted}",
                hint="Nothing was changed: find out who put it there.",
                store=url,
            )

    def check_plain(self, store_id: str, config: Config, url: str) -> None:
        if not self._plain:
            raise StoreNotTrusted(
                f"{url} is not encrypted: every user who can read or write it can read or forge "
                "checkpoints",
                hint="If it is meant to be so, say --no-encrypt.",
                store=url,
            )

    def met(self, store_id: str, opened: keys.Opened | None, *, encrypted: bool, url: str) -> None:
        self.check_config({"id": store_id}, url)
        self.record(store_id, opened, encrypted=encrypted, how="trusted")


def _path(place: str, config: Config) -> Path:
    name = hashlib.blake2b(os.fsencode(place), digest_size=16).hexdigest()
    return Path(config.state_dir) / "stores" / f"{name}.json"


def _fingerprint(opened: keys.Opened | None) -> str:
    """Return the fingerprint of the master key; "" where there is none, or it is not known."""
    return fingerprint(opened.master) if opened is not None and opened.master else ""


def _read(path: Path, place: str) -> Pin | None:
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_SIZE)
    except FileNotFoundError:
        return None
    try:
        pin = convert(json.loads(text), Pin)
        if pin.place != place or len(pin.id) != 32:
            raise ValueError
        return pin
    except (ValueError, ValidationError, RecursionError):
        raise Damaged(
            f"{path}, which says what store this host expects at {place}, cannot be understood",
            hint=(
                "Bring it back from a backup; or run `criuctl store trust`, if it is certain that "
                "the store is the right one."
            ),
        ) from None


def _write(path: Path, pin: Pin, *, replace: bool) -> None:
    """Write the file, whole and durable; raise `FileExistsError` if one exists and `replace` is not
    set.
    """
    # the state folder itself: folders made on the way to it are readable by all
    make_private(path.parent.parent)
    make_private(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(
            os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "w"
        ) as file:
            json.dump(asdict(pin), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


__all__ = ["How", "Pin", "Pinning"]

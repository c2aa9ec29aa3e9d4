"""Places where a store can be: what the contract is tested against, and a look at it past
criuctl.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from servers import S3Server

from criuctl.config import Config
from criuctl.proc.early_process import EarlyProcess
from criuctl.store import BOTO3_PROCESS, Store, open_store
from criuctl.store.boto3_process import ProcessStore
from criuctl.store.local import LocalStore
from criuctl.store.remote import RemoteStore
from criuctl.store.serving import StoreServer
from criuctl.transport.link import Link

BUCKET = "contract"


@dataclass
class Place:
    """An empty store of one kind, and a look at it past criuctl."""

    kind: str
    url: str
    config: Config
    left: Callable[[], list[str]]  # everything that lies there, by whatever name
    environment: dict[str, str] = field(default_factory=dict)  # for other processes
    server: S3Server | None = None
    opened: list[Store] = field(default_factory=list)
    opener: Callable[[], Store] | None = None  # where no URL leads to it

    def open(self) -> Store:
        """One more handle on the place."""
        store = self.opener() if self.opener else open_store(self.url, self.config)
        self.opened.append(store)
        return store


def s3_place(
    kind: str, server: S3Server, monkeypatch: pytest.MonkeyPatch, **config: object
) -> Place:
    """A fresh prefix in the server's bucket; the environment gives the credentials, as a user's
    does.
    """
    server.make_bucket(BUCKET)
    for key, value in server.env.items():
        monkeypatch.setenv(key, value)
    prefix = uuid.uuid4().hex

    def left() -> list[str]:
        return server.keys(BUCKET, prefix) + [
            f"unfinished {key}" for key in server.multipart_uploads(BUCKET) if prefix in key
        ]

    return Place(
        kind, f"s3://{BUCKET}/{prefix}", Config().with_options(**config), left, server.env, server
    )


class ApartStore(ProcessStore):
    """A store spoken to by a process of its own, which is gone when the store is closed."""

    def __init__(self, url: str, config: Config) -> None:
        self.aside = EarlyProcess(BOTO3_PROCESS)
        super().__init__(url, config, self.aside)

    def close(self) -> None:
        super().close()
        self.aside.reap()


def apart_place(place: Place) -> Place:
    """The same, spoken to by a process of its own."""
    place.kind, place.opener = "apart", lambda: ApartStore(place.url, place.config)
    return place


def local_place(folder: Path) -> Place:
    """A folder that `create` is yet to make."""

    def left() -> list[str]:
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()]

    return Place("local", str(folder), Config(state_dir=str(folder.parent / "state")), left)


class LinkedStore(RemoteStore):
    """A store on the other side of a link, with both of its ends."""

    def __init__(self, served: Store) -> None:
        (there, to_us), (here, to_them) = os.pipe(), os.pipe()
        self.server = Link(here, to_us, StoreServer(served).handle, name="here")
        self.link = Link(there, to_them, name="there")
        super().__init__(self.link, f"there:{served.url}")
        for link in (self.server, self.link):
            link.start()

    def close(self) -> None:
        self.link.close()
        self.server.close()


def linked_place(folder: Path) -> Place:
    """A local store, reached over a link."""
    place = local_place(folder)
    place.kind, place.opener = "linked", lambda: LinkedStore(LocalStore(str(folder)))
    return place

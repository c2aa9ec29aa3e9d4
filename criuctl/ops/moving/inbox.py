"""The inbox: a store of this host for sessions that come from others.

It is encrypted by a key that stays on this host; whoever sends is told the key over ssh, for as long as the sending takes.
Of each session its newest checkpoint is kept: what is in it need not be sent again when the session comes back, and if
this host dies in the middle, the session can be restored from it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from ...checkpoint.repository import Repository
from ...config import Config
from ...errors import Conflict, NoSuchBucket, StoreNotInitialised
from ...report import Reporter
from ...store import open_store
from ..storing import retention

_GRACE = "1h"  # no sending takes longer


def configured(config: Config) -> Config:
    """The configuration with the inbox as its store."""
    return replace(config, store=str(Path(config.state_dir) / "inbox"), key_file="", passphrase_file="", passphrase_command="")


def opened(config: Config) -> Repository:
    """This host's inbox, made if there is none; the caller closes it, and its store."""
    config = configured(config)
    store = open_store(config.store, config)
    try:
        try:
            return Repository.open(store, config)
        except (StoreNotInitialised, NoSuchBucket):
            try:
                return Repository.init(store, encryption=True, config=config)
            except Conflict:  # another criuctl was faster
                return Repository.open(store, config)
    except BaseException:
        store.close()
        raise


def tidy(repository: Repository, session: str, keep: Collection[str], reporter: Reporter) -> None:
    """Remove the checkpoints of that name but those to `keep`, and what nothing needs any more."""
    from ...checkpoint import gc

    for summary in repository.list(session):
        if summary.id not in keep and not summary.pinned:
            repository.remove(summary)
    gc.Collection(repository, reporter, grace=retention.seconds(_GRACE)).run()

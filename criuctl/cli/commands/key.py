"""``criuctl key list|add|remove|rotate|recovery|tidy``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import complete
from ..app import DEGRADED, App, pass_app
from ..pages import Entry, LazyGroup, page
from ..passphrases import ask
from ..streams import tell
from ..tables import Column
from ..text import age, plural, printable

if TYPE_CHECKING:
    from ...ops.store_keys import KeyChange, NewKey

_SELF = "criuctl.cli.commands.key"
_COLUMNS = (
    Column("fingerprint"),
    Column("kind", rank=1),
    Column("label", rank=2, prose=True),
    Column("created", right=True, rank=3),
    Column(""),
)
_EXITS = [7, 8, 9, 11]

key = LazyGroup(
    "key",
    entries={
        "list": Entry(f"{_SELF}:list_", "List the keys that open the store."),
        "add": Entry(f"{_SELF}:add", "Add a key that opens the store."),
        "remove": Entry(f"{_SELF}:remove", "Remove a key from the store."),
        "rotate": Entry(
            f"{_SELF}:rotate", "Replace the key that opens the store here by a new one."
        ),
        "recovery": Entry(f"{_SELF}:recovery", "Make a recovery key, to be written down."),
        "tidy": Entry(f"{_SELF}:tidy", "Finish a change of keys that was interrupted."),
    },
    summary="List and change the keys of an encrypted store.",
    help="""\
    An encrypted store has one master key, and any number of keys that open it: key files,
    passphrases, recovery keys. They are added and removed at any time, during dumps and restores on
    any host, and nothing that is stored is written again. An interrupted change leaves a store that
    opens as before, or as requested.

    The master key does not change. So anyone who has opened the store once, or keeps a removed key
    together with an old copy of the store's config (a backup, an older version in a bucket that
    keeps them), can still read the store. To lock a person out for good, make a new store and
    export the checkpoints into it.

    A write-only host (criuctl key add --write-only) can add checkpoints, and restore those of its
    own, with no key to anything else: an attacker who breaks into it can read no other host's.""",
    examples=[
        ("A key on paper, in case all others are lost:", "criuctl key recovery"),
        (
            "A key for another host:",
            "criuctl key add --key-file /media/stick/beta.key --label beta",
        ),
        (
            "For a host that must not read what others store:",
            "criuctl key add --write-only /media/stick/web1.key --label web1",
        ),
        ("After this host's key file may have been read:", "criuctl key rotate"),
    ],
    exits=[7, 8, 9],
    see_also=["store init", "store key"],
)

_FILE = click.Path(dir_okay=False, path_type=Path)
_LABEL = click.option(
    "--label",
    default="",
    metavar="TEXT",
    help="A name for people, which is not secret.  [default: none]",
)
_PASSPHRASE = click.option(
    "--passphrase", is_flag=True, help="A passphrase, asked for on the terminal."
)
_PASSPHRASE_FILE = click.option(
    "--passphrase-file",
    metavar="PATH",
    type=_FILE,
    help="The passphrase in this file, mode 0600.  [default: a key file]",
)


def _new(
    key_file: Path | None, passphrase: bool, passphrase_file: Path | None, label: str
) -> NewKey:
    from ...ops.store_keys import NewKey
    from ...ops.transfer import read_passphrase

    if sum((key_file is not None, passphrase, passphrase_file is not None)) > 1:
        raise click.UsageError("--key-file, --passphrase and --passphrase-file exclude each other")
    phrase = read_passphrase(passphrase_file) if passphrase_file is not None else None
    return NewKey(
        key_file, ask("New passphrase of the store", twice=True) if passphrase else phrase, label
    )


def _emit(app: App, done: KeyChange, lines: list[str]) -> int:
    """Print the result of a change, the current number of keys, and problems."""
    hosts = sum(one.kind == "writer" for one in done.keys)
    opening = len(done.keys) - hosts
    count = f"{plural(opening, 'key')} now open{'s' if opening == 1 else ''} the store"
    count += f", and {plural(hosts, 'write-only host')} may add to it." if hosts else "."
    app.emit(
        done.to_dict(),
        lambda: "\n".join([*lines, count]),
        lambda: "",
    )
    if not app.json:
        for warning in done.warnings:
            tell(f"criuctl: warning: {printable(warning)}")
    return DEGRADED if done.degraded else 0


_HONEST = (
    "Anyone who kept it and an old copy of the store's config, or has opened the store before, can "
    "still read what is in the store."
)


@page(
    examples=[("The keys of the default store:", "criuctl key list")],
    exits=[7, 8, 9],
    see_also=["key add", "store key"],
)
@pass_app
def list_(app: App) -> int:
    """List the keys that open the store: fingerprint, kind (file, passphrase, recovery), label,
    when it was added, and which one was used now. The fingerprint of a passphrase is that of its
    slot in the store, and reveals nothing about it. Write-only hosts are listed, too; in JSON their
    kind is writer.
    """
    from ...ops.store_keys import key_list

    found, notes = key_list(app.config)
    rows = [
        (
            one.fingerprint,
            "write-only" if one.kind == "writer" else printable(one.kind),
            printable(one.label),
            age(one.created),
            "in use here" if one.used else "",
        )
        for one in found
    ]
    app.emit_table(
        [one.to_dict() for one in found],
        _COLUMNS,
        rows,
        empty="no keys",
        brief=lambda: "\n".join(one.fingerprint for one in found),
    )
    if not app.json:
        for note in notes:
            tell(f"criuctl: warning: {note}")
    return 0


@page(
    examples=[
        (
            "A key for another host, which gets the file:",
            "criuctl key add --key-file /media/stick/beta.key --label beta",
        ),
        ("A passphrase:", "criuctl key add --passphrase"),
        (
            "For a host that shall only add checkpoints:",
            "criuctl key add --write-only /media/stick/web1.key --label web1",
        ),
        (
            "A key file for this host, after the recovery key has opened the store:",
            "CRIUCTL_KEY_FILE=- criuctl key add",
        ),
    ],
    exits=_EXITS,
    see_also=["key list", "key rotate", "key recovery"],
)
@click.option(
    "--key-file",
    metavar="PATH",
    type=_FILE,
    help=(
        "The key in this file, which is made if it does not exist.  [default: this host's, in the "
        "configured key_dir]"
    ),
)
@click.option(
    "--write-only",
    metavar="PATH",
    type=_FILE,
    help=(
        "Make the key of a write-only host in this file; it opens nothing of the others.  "
        "[default: a key that opens the store]"
    ),
)
@_PASSPHRASE
@_PASSPHRASE_FILE
@_LABEL
@pass_app
def add(
    app: App,
    /,
    key_file: Path | None,
    write_only: Path | None,
    passphrase: bool,
    passphrase_file: Path | None,
    label: str,
) -> int:
    """Add a key that opens the store. It is checked to do so before the store is changed.

    A new key file is written first, mode 0600; bring it to the key_dir of the host that is to use
    it, under the name STORE-ID.key.

    The file of --write-only goes there, too, on the host that it is for, and nowhere else: each
    such host has its own. That host dumps, snapshots and restores like any other. But it can read
    only what it has stored itself, and only while it has the file STORE-ID.WRITER.domain that it
    makes next to the key at its first dump. list shows how many checkpoints are others'; commands
    that need those fail (exit 8). gc and the key commands are refused there (exit 9). It sees the
    names of sessions only as far as it can guess them. It does not get back a session that another
    host has taken over (exit 9), since it cannot read the lease. key remove ends its right to write
    as far as criuctl there is concerned. If the host was broken into, withdraw its credentials for
    the store as well, and restore nothing that it has stored since.
    """
    from ...ops.store_keys import NewKey, key_add

    if write_only is not None:
        if key_file is not None or passphrase or passphrase_file is not None:
            raise click.UsageError(
                "--write-only excludes --key-file, --passphrase and --passphrase-file"
            )
        done = key_add(app.config, NewKey(write_only, label=label, write_only=True))
        what = (
            f"The key in {printable(done.file)} ({done.added[0]}) lets a host add to "
            f"{printable(done.store)}"
        )
        return _emit(
            app,
            done,
            [f"{what} and read its own.", f"Bring it to that host's key_dir as {done.id}.key."],
        )
    done = key_add(app.config, _new(key_file, passphrase, passphrase_file, label))
    what = f"The key in {printable(done.file)}" if done.file else "The passphrase"
    made = [f"{printable(done.file)} did not exist: a new key was made there."]
    lines = made if done.made and done.file else []
    return _emit(app, done, [*lines, f"{what} ({done.added[0]}) opens {printable(done.store)}."])


@page(
    examples=[
        ("By its label:", "criuctl key remove beta"),
        (
            "The one that is in use here, since a passphrase opens the store, too:",
            "criuctl key remove 3f9a --other-passphrase-file p",
        ),
    ],
    exits=[3, *_EXITS],
    see_also=["key list", "key rotate"],
)
@click.argument(
    "ref",
    shell_complete=complete.store_key,
    help="The key's label, or the begin of its fingerprint (4 digits or more).",
)
@click.option(
    "--other-key-file",
    metavar="PATH",
    type=_FILE,
    help=(
        "Show that this key opens the store, if the one in use is to go; - asks for a recovery "
        "key.  [default: none]"
    ),
)
@click.option(
    "--other-passphrase-file",
    metavar="PATH",
    type=_FILE,
    help="The same with the passphrase in this file.  [default: none]",
)
@pass_app
def remove(
    app: App, /, ref: str, other_key_file: Path | None, other_passphrase_file: Path | None
) -> int:
    """Remove a key from the store, so that it no longer opens it, or a write-only host, so that it
    no longer adds to it. No file is removed.

    The last key is never removed, and the one that opened the store only if another one is shown
    (exit 9). Commands that have the store open continue until they open it again. A removed key
    that was kept still opens older copies of the store, such as backups; see criuctl key --help for
    what a removal cannot undo.
    """
    if other_key_file is not None and other_passphrase_file is not None:
        raise click.UsageError("--other-key-file and --other-passphrase-file exclude each other")
    from ...ops.store_keys import key_remove
    from ...ops.transfer import read_passphrase

    phrase = read_passphrase(other_passphrase_file) if other_passphrase_file is not None else None
    done = key_remove(app.config, ref, other_key_file=other_key_file, other_passphrase=phrase)
    lines = [f"The key {done.removed[0]} does not open {printable(done.store)} any more.", _HONEST]
    if done.removed_writer:
        lines = [
            f"The write-only host {done.removed[0]} adds nothing to {printable(done.store)} any "
            "more, if its criuctl obeys.",
            "If it was broken into, withdraw its credentials for the store, and restore nothing "
            "that it has stored since.",
        ]
    return _emit(app, done, lines)


@page(
    examples=[
        ("This host's key file:", "criuctl key rotate"),
        ("Replace a passphrase:", "criuctl key rotate --passphrase"),
    ],
    exits=_EXITS,
    see_also=["key list", "key remove", "store key"],
)
@click.option(
    "--key-file",
    metavar="PATH",
    type=_FILE,
    help=(
        "By the key in this file, which is made if it does not exist.  [default: a new one in "
        "place of this host's]"
    ),
)
@_PASSPHRASE
@_PASSPHRASE_FILE
@_LABEL
@pass_app
def rotate(
    app: App, /, key_file: Path | None, passphrase: bool, passphrase_file: Path | None, label: str
) -> int:
    """Replace the key that opens the store here by a new one; the other keys stay.

    Without options it replaces this host's key file in the configured key_dir. The file there opens
    the store at every instant, and the old file stays next to it as STORE-ID.FINGERPRINT.key, for
    checkpoints that were exported with it. Another host that has a copy of the old file needs the
    new one: to change both in turn, use criuctl key add, bring the file there, and criuctl key
    remove.

    If the store is opened in another way (key_file, a passphrase), the options give the
    replacement; the configuration must name it from then on.
    """
    from ...ops.store_keys import key_rotate

    done = key_rotate(app.config, _new(key_file, passphrase, passphrase_file, label))
    what = f"the key in {printable(done.file)}" if done.file else "the new passphrase"
    lines = [
        (
            f"{what[0].upper()}{what[1:]} ({done.added[0]}) opens {printable(done.store)}, "
            f"{done.removed[0]} does not any more."
        )
    ]
    if done.previous:
        lines.append(
            f"The old key is in {printable(done.previous)}: exported checkpoints may need it."
        )
    else:
        lines.append("Let the configuration name the new one from now on.")
    return _emit(app, done, [*lines, _HONEST])


@page(
    examples=[
        ("Print one, and write it down:", "criuctl key recovery"),
        ("The paper was lost:", "criuctl key recovery --replace"),
        ("All other keys are lost:", "CRIUCTL_KEY_FILE=- criuctl key add"),
    ],
    exits=_EXITS,
    see_also=["key add", "key remove"],
)
@click.option("--replace", is_flag=True, help="Remove the recovery keys that there are.")
@_LABEL
@pass_app
def recovery(app: App, /, replace: bool, label: str) -> int:
    """Make a key that is printed now, once, and never stored: eight groups of six letters, to be
    written down and kept away from the host's disks. Each group has a check letter, so an error in
    typing it is reported with its group.

    It opens the store by CRIUCTL_KEY_FILE=-, which asks for it (or reads a line of standard input),
    by the variable CRIUCTL_RECOVERY_KEY, or from a file, mode 0600, that key_file names.
    """
    from ...ops.store_keys import key_recovery

    done = key_recovery(app.config, label=label, replace=replace)
    count = len(done.removed)
    app.emit(done.to_dict(), lambda: str(done.recovery_key), brief=lambda: str(done.recovery_key))
    if not app.json and not app.quiet:
        tell(
            f"Write it down: it opens {printable(done.store)} and is shown only now "
            f"({done.added[0]})."
        )
        if count:
            tell(
                f"{plural(count, 'older recovery key')} open{'s' if count == 1 else ''} the store "
                "no more."
            )
    for warning in [] if app.json else done.warnings:
        tell(f"criuctl: warning: {printable(warning)}")
    return DEGRADED if done.degraded else 0


@page(
    examples=[("After a key command was cut off:", "criuctl key tidy")],
    exits=_EXITS,
    see_also=["key list"],
)
@pass_app
def tidy(app: App) -> int:
    """Finish a change of keys that was interrupted: removed and superseded keys are deleted from
    the store itself. Which keys open the store is not changed. Any other change of keys does the
    same.
    """
    from ...ops.store_keys import key_tidy

    done = key_tidy(app.config)
    facts: list[Any] = (
        [f"{printable(done.store)}: nothing of older keys is left."] if not done.warnings else []
    )
    return _emit(app, done, facts)

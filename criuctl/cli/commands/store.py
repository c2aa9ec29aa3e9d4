"""``criuctl store init|info|key``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..pages import Entry, LazyGroup, page
from ..text import facts, plural, printable, size

_SELF = "criuctl.cli.commands.store"
_GROWING = 10  # sessions whose growth a terminal shows

store = LazyGroup(
    "store",
    entries={
        "init": Entry(f"{_SELF}:init", "Make a store."),
        "info": Entry(
            f"{_SELF}:info", "Describe a store: format, encryption, contents, abilities."
        ),
        "trust": Entry(
            f"{_SELF}:trust",
            "Accept the store that is there now, after it was replaced on purpose.",
        ),
        "key": Entry(f"{_SELF}:key", "Show where a store's key is, or export it."),
    },
    summary="Make and describe stores and their keys.",
    help="""\
    A store keeps checkpoints: a folder, or a bucket (with a prefix, if you like) of any
    S3-compatible service. Endpoint, region and credentials of S3 are found as boto3 finds them
    (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ~/.aws, ...), or in the configuration. A store is made
    once, with criuctl store init; any number of hosts may use it.

    Each host remembers, by the store's URL, which store it made or met there first: its id, its
    key, and whether it is encrypted. Another one in its place is refused (exit 9) before anything
    is read or stored; criuctl store trust says that it was replaced on purpose.""",
    examples=[("A store in a bucket, encrypted:", "criuctl store init --store s3://backups/trees")],
    exits=[7, 8, 9],
    see_also=["doctor"],
)


def _ask_passphrase() -> bytes:
    """Ask for the new passphrase, twice, on the terminal; it is never an argument, which other
    users could read.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "--passphrase asks on a terminal, and there is none",
            hint="Set passphrase_file or passphrase_command in the configuration instead.",
        )
    typed = click.prompt(
        "Passphrase of the new store", hide_input=True, confirmation_prompt="Once more", err=True
    )
    return str(typed).encode()


def _sealed(body: dict[str, Any]) -> str:
    key = body["key"]
    if not body["encrypted"]:
        return "not encrypted"
    if key["kind"] == "passphrase":
        return f"encrypted, opened by the passphrase from {printable(key['source'])}"
    if key["kind"] == "recovery":
        return f"encrypted, opened by the recovery key from {printable(key['source'])}"
    if key["kind"] == "writer":
        return f"encrypted, this host is write-only: key in {printable(key['file'])}"
    return (
        f"encrypted, {'exported ' if key['kind'] == 'master' else ''}key in "
        f"{printable(key['file'])}"
    )


@page(
    examples=[
        ("The default store:", "criuctl store init"),
        (
            "A bucket; encrypted, as stores are by default:",
            "criuctl store init --store s3://backups/trees",
        ),
        (
            "A folder in which memory may be read by all who can read the folder:",
            "criuctl store init --store /mnt/scratch/trees --no-encrypt",
        ),
        ("With a key on paper:", "criuctl store init --store s3://backups/trees --recovery-key"),
    ],
    exits=[7, 8, 9],
    see_also=["key", "store key", "store info"],
)
@click.option(
    "--encrypt/--no-encrypt",
    default=True,
    help="Encrypt what is stored.  [default: yes]",
)
@click.option(
    "--key-file",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the new key here, mode 0600; an existing key file is used as it is."
    "  [default: a file of the store's id in the configured key_dir]",
)
@click.option(
    "--passphrase",
    is_flag=True,
    help="Seal the key with a passphrase, asked for on the terminal or given by the configuration.",
)
@click.option(
    "--recovery-key",
    is_flag=True,
    help=(
        "Make a recovery key too, which opens the store as well: it is printed now, once, to be "
        "written down."
    ),
)
@pass_app
def init(
    app: App, encrypt: bool, key_file: Path | None, passphrase: bool, recovery_key: bool
) -> int:
    """Make a store, find out its abilities, and make its key. An existing store is never changed
    (exit 9).

    An encrypted store cannot be read without its key: keep a copy elsewhere (criuctl store key
    --export). A store that lacks conditional writes works, for one writer at a time.

    This host pins the store: a different one in its place is refused from then on. Where a pinned
    store is gone, the new one is pinned instead.
    """
    if not encrypt and (key_file is not None or passphrase or recovery_key):
        raise click.UsageError("--no-encrypt excludes --key-file, --passphrase and --recovery-key")
    if key_file is not None and passphrase:
        raise click.UsageError("--key-file and --passphrase exclude each other")
    from ...ops.stores import store_init

    ask = _ask_passphrase if passphrase else None
    body = store_init(
        app.config,
        encryption=encrypt,
        key_file=key_file,
        ask_passphrase=ask,
        recovery_key=recovery_key,
    ).to_dict()

    def human() -> str:
        sealed = "encrypted with a passphrase" if passphrase else _sealed(body)
        lines = [f"{printable(body['store'])}: store {body['id'][:12]} is ready, {sealed}"]
        if passphrase:
            lines.append(
                "Give the passphrase by passphrase_file, passphrase_command or CRIUCTL_PASSPHRASE "
                "from now on."
            )
        elif key_file is not None:
            lines.append(
                "Name the key file by key_file in the configuration or by CRIUCTL_KEY_FILE from "
                "now on."
            )
        if body["encrypted"]:
            lines.append(
                "Keep a copy of the key elsewhere (criuctl store key --export): without it "
                "nothing can be read."
            )
        if recovery_key:
            lines.append(
                f"Recovery key, shown only now, to be written down: {body['recovery_key']}"
            )
        return "\n".join(lines)

    app.emit(
        body,
        human,
        brief=lambda: "\n".join(
            [str(body["id"]), *([body["recovery_key"]] if recovery_key else [])]
        ),
    )
    return 0


@page(
    examples=[("The contents of the default store:", "criuctl store info")],
    exits=[7, 8],
    see_also=["list", "doctor"],
)
@pass_app
def info(app: App) -> int:
    """Describe the store: its id and format, whether it is encrypted, how many sessions,
    checkpoints and objects it holds and how much space they take, and its abilities.

    Deduplication is the size of all checkpoints, if each were kept whole, divided by the size of
    their distinct content; compression is that divided by the size of the packs. Growth is what
    each session's last ten checkpoints have added to the store, and the amount in a day as soon as
    they span one; all of it in the JSON, on a terminal the ten sessions that grow most. Deleted
    data that a bucket with versions still keeps is shown too: its own lifecycle rules decide when
    that goes.
    """
    from ...ops.stores import store_info

    body = store_info(app.config).to_dict()
    app.emit(body, lambda: _described(body), brief=lambda: str(body["id"]))
    return 0


def _described(body: dict[str, Any]) -> str:
    can, taken, ratios = body["capabilities"], body["bytes"], body["ratios"]
    unreadable = f", and {body['unreadable']} that cannot be read" if body["unreadable"] else ""
    unreadable += (
        f", and {body['hidden']} of other hosts, which this one may not read"
        if body["hidden"]
        else ""
    )
    conditional = "conditional: several hosts may write at a time"
    rows = [
        ("store", printable(body["store"])),
        ("id", printable(body["id"])),
        ("created", f"{printable(body['created'])}, format {body['format']}"),
        ("contents", _sealed(body)),
        ("pin", _pinned(body["pin"])),
        *(
            [("keys", f"{plural(len(body['key']['slots']), 'key')} (criuctl key list)")]
            if body["encrypted"]
            else []
        ),
        ("sessions", str(body["sessions"])),
        ("checkpoints", f"{body['checkpoints']}{unreadable}"),
        ("objects", f"{plural(body['objects'], 'object')}, {size(taken['stored'])}"),
        (
            "writes",
            conditional
            if can["conditional_create"]
            else "not conditional: let one host write at a time",
        ),
    ]
    if ratios["total"]:
        parts = (
            f"deduplication {_times(ratios['deduplication'])}, compression "
            f"{_times(ratios['compression'])}"
        )
        rows.append(
            (
                "saved",
                (
                    f"{size(taken['whole'])} in {size(taken['stored'])}, "
                    f"{_times(ratios['total'])}: {parts}"
                ),
            )
        )
    for one in body["growth"][:_GROWING]:
        pace = f"{size(one['per_day'])} a day, " if one["per_day"] is not None else ""
        amount = f"{plural(one['checkpoints'], 'checkpoint')}, {size(one['stored'])}"
        later = f"; {pace}{size(one['recent'])} each" if one["checkpoints"] > 1 else ""
        rows.append((f"  {printable(one['session'])}", amount + later))
    if (kept := body["kept"]) and kept["versions"]:
        lock = f", locked ({printable(kept['lock'])})" if kept["lock"] else ""
        many = (
            f"{plural(kept['objects'], 'older version')}, {size(kept['bytes'])}"
            if kept["objects"] is not None
            else "older versions"
        )
        rows.append(("deleted", f"the bucket keeps {many}{lock}; its lifecycle rules free them"))
    return facts(rows)


def _pinned(pin: Mapping[str, Any]) -> str:
    if pin["problem"]:
        return f"not pinned on this host: {printable(pin['problem'])}"
    how = {"init": "made by this host", "first-use": "met first", "trusted": "trusted"}.get(
        pin["how"] or "", ""
    )
    return (
        f"{how} {printable(pin['since'])}; another store here is refused" if how else "not pinned"
    )


def _times(ratio: float | None) -> str:
    return f"{ratio:.1f} times" if ratio is not None else "unknown"


@page(
    examples=[
        (
            "The bucket was made again, by a known person:",
            "criuctl store trust --store s3://backups/trees",
        ),
        (
            "When a host is set up, with the id that criuctl store info -q printed on another:",
            "criuctl store trust 3f9ac27d",
        ),
        (
            "A bucket that is meant to be without encryption:",
            "criuctl store trust --no-encrypt --store s3://lab/scratch",
        ),
    ],
    exits=[7, 8, 9, 13],
    see_also=["store init", "store info"],
)
@click.argument(
    "store_id",
    metavar="[ID]",
    required=False,
    default="",
    help="The begin of the id that the store must have.  [default: any id]",
)
@click.option(
    "--no-encrypt",
    is_flag=True,
    help="The store may be one without encryption.  [default: such a store is refused]",
)
@pass_app
def trust(app: App, store_id: str, no_encrypt: bool) -> int:
    """Pin the store that is at the URL now, in place of the one that this host expected there, and
    show both. Its key must be here, as for any other command.

    A host pins a store when it makes it or meets it first, so this command is not needed then. It
    is for a store that was replaced on purpose, for one in S3 without encryption that another host
    has made, and for setting up hosts by an id that is known. Any user who can write to a store can
    replace it: find out which user has done so before you trust it.
    """
    from ...ops.stores import store_trust

    body = store_trust(app.config, store_id=store_id.lower(), plain=no_encrypt).to_dict()

    def human() -> str:
        sealed = "encrypted" if body["encrypted"] else "not encrypted"
        lines = [
            (
                f"{printable(body['store'])}: store {body['id'][:12]}, {sealed}, is expected here "
                "from now on"
            )
        ]
        if (before := body["before"]) and before["id"] != body["id"]:
            was = "encrypted" if before["encrypted"] else "not encrypted"
            lines.append(
                f"Before: store {printable(before['id'][:12])}, {was}, since "
                f"{printable(before['since'])}."
            )
        return "\n".join(lines)

    app.emit(body, human, brief=lambda: str(body["id"]))
    return 0


@page(
    examples=[
        ("Where is the key?", "criuctl store key"),
        ("Keep a copy on a stick:", "criuctl store key --export /media/stick/trees.key"),
    ],
    exits=[7, 8, 9],
    see_also=["store init", "key"],
)
@click.option(
    "--export",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help=(
        "Write the key to this new file, mode 0600. Anyone who has it can read the store.  "
        "[default: write nothing]"
    ),
)
@pass_app
def key(app: App, export: Path | None) -> int:
    """Show where the key of the store was found and whether it is the right one. The key itself is
    never printed; --export writes a copy of it to a file that does not exist yet.
    """
    from ...ops.stores import store_key

    if str(export) == "-":  # elsewhere that is standard output
        raise click.UsageError("a key is never printed: --export wants the name of a new file")
    body = store_key(app.config, export=export).to_dict()

    def human() -> str:
        lines = [f"{printable(body['store'])}: {_sealed(body)}"]
        if body["key"]["fingerprint"]:
            lines[0] += f", fingerprint {body['key']['fingerprint']}"
        if body["exported"]:
            lines.append(
                f"The key was written to {printable(body['exported'])}; anyone who has it can "
                "read the store."
            )
        return "\n".join(lines)

    app.emit(body, human, brief=lambda: str(body["key"]["file"] or ""))
    return 0

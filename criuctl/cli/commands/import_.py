"""``criuctl import``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..app import App, pass_app
from ..pages import page
from ..passphrases import ask
from ..text import printable, size
from .dump import NO_ENCRYPT


@page(
    examples=[
        ("Bring the checkpoint back:", "criuctl import web.criuctl\ncriuctl restore web"),
        (
            "Into a bucket, with a key of the file's own:",
            "criuctl import web.criuctl --key-file web.key --store s3://backups/trees",
        ),
        ("From another host:", "ssh root@alpha criuctl export web - | criuctl import -"),
    ],
    exits=[7, 8, 9],
    see_also=["export", "list", "restore", "store init"],
)
@click.argument(
    "file", type=click.Path(), help="A file that criuctl export wrote; - is standard input."
)
@click.option(
    "--as",
    "name",
    metavar="NAME",
    help=(
        "Import it as a checkpoint of another session, NAME, as `restore --as` does.  [default: "
        "its own session]"
    ),
)
@click.option(
    "--key-file",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Open FILE with this key file.  [default: the key of this host that fits]",
)
@click.option(
    "--passphrase",
    is_flag=True,
    help="Open FILE with a passphrase that is asked for on the terminal.",
)
@click.option(
    "--passphrase-file",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Open FILE with the passphrase in this file, mode 0600.  [default: the configuration's]",
)
@NO_ENCRYPT
@pass_app
def import_(
    app: App,
    file: str,
    name: str | None,
    key_file: Path | None,
    passphrase: bool,
    passphrase_file: Path | None,
    no_encrypt: bool,
) -> int:
    """Read a checkpoint that criuctl export wrote into the store. The whole file is read and
    checked first, every chunk once more before it is stored, the manifest last: a file that is
    damaged, cut off, or not criuctl's (exit 8) leaves the store as it was.

    The checkpoint keeps its id and labels and gets the next number of its session, so it is the
    newest one from then on. One that the store has already is left as it is (imported is false in
    the JSON). Memory and files that the store has already are not stored again. The store, not the
    file, decides whether it is encrypted there.

    An encrypted file needs its key: the key file, or the passphrase, of the store that it was
    exported from, or the one chosen at the export. Key files are looked for like those of stores
    (key_file, and all of key_dir), then the passphrase of the configuration is tried; on a terminal
    it is asked for.

    To restore a checkpoint is to run a program with its rights. Import only files that you trust,
    especially those that are not encrypted: anyone can make one.

    Input from a pipe is held in memory until it is imported.
    """
    if sum((key_file is not None, passphrase, passphrase_file is not None)) > 1:
        raise click.UsageError("--key-file, --passphrase and --passphrase-file exclude each other")
    if file == "-" and sys.stdin.isatty():
        raise click.UsageError("standard input is a terminal: name a file, or send one")
    from ...ops.transfer import Key, read_passphrase
    from ...ops.transfer import import_ as import_checkpoint

    if passphrase_file is not None:
        key = Key(passphrase=read_passphrase(passphrase_file))
    elif passphrase:
        key = Key(passphrase=ask("Passphrase of the file"))
    else:
        key = Key(
            file=key_file,
            ask=(lambda: ask("Passphrase of the file"))
            if file != "-" and sys.stdin.isatty()
            else None,
        )
    with app.reporting() as reporter:
        config = app.config.with_options(plain_store=no_encrypt or None)
        done = import_checkpoint(
            config, 0 if file == "-" else Path(file), reporter=reporter, key=key, name=name
        )
    body = done.to_dict()

    def human() -> str:
        there = f"{printable(body['session'])}@{body['number']} ({body['checkpoint'][:12]})"
        if not body["imported"]:
            return f"{there}: is in {printable(body['store'])} already; nothing was changed"
        return (
            f"{there}: imported into {printable(body['store'])}, "
            f"{size(body['bytes'].get('stored', 0))} stored"
        )

    app.emit(body, human, brief=lambda: str(body["checkpoint"]))
    return 0

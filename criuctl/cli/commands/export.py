"""``criuctl export``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..passphrases import ask
from ..streams import tell, write_bytes
from ..text import printable, size

if TYPE_CHECKING:
    from ...ops.transfer import Seal


def _seal(
    key_file: Path | None, passphrase: bool, passphrase_file: Path | None, no_encrypt: bool
) -> Seal:
    from ...ops.transfer import Seal, read_passphrase

    if sum((key_file is not None, passphrase, passphrase_file is not None, no_encrypt)) > 1:
        raise click.UsageError(
            "--key-file, --passphrase, --passphrase-file and --no-encrypt exclude each other"
        )
    if no_encrypt:
        return Seal("none")
    if key_file is not None:
        return Seal("file", key_file=key_file)
    if passphrase:
        return Seal("passphrase", passphrase=ask("Passphrase of the file", twice=True))
    if passphrase_file is not None:
        return Seal("passphrase", passphrase=read_passphrase(passphrase_file))
    return Seal()


def _for_people(body: dict[str, Any]) -> str:
    key = body["key"]
    opens = {
        "none": "It is not encrypted: its readers can read the memory of the tree.",
        "file": f"The key file {printable(key['file'])} (fingerprint {key['fingerprint']}) opens "
        "it.",
        "passphrase": "Its passphrase opens it.",
    }
    name = f"{printable(body['session'])}@{body['number']}"
    return (
        f"{name}: exported to {printable(body['file'])}, "
        f"{size(body['bytes']['file'])}\n{opens[key['kind']]}"
    )


@page(
    examples=[
        ("The newest checkpoint of web as a file:", "criuctl export web web.criuctl"),
        (
            "For a person without the store's key:",
            "criuctl export web@3 web.criuctl --passphrase",
        ),
        (
            "Into the store of another host:",
            "criuctl export web - | ssh root@gamma criuctl import -",
        ),
    ],
    exits=[3, 7, 8, 9],
    see_also=["import", "show", "store key"],
)
@click.argument(
    "ref",
    shell_complete=complete.checkpoint_ref,
    help="NAME, NAME@N, or the begin of a checkpoint's id.",
)
@click.argument(
    "file", type=click.Path(dir_okay=False), help="The file to be written; - is standard output."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option(
    "--key-file",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help=(
        "Encrypt FILE to this key file, which is made if it does not exist.  [default: what opens "
        "the store]"
    ),
)
@click.option(
    "--passphrase",
    is_flag=True,
    help="Encrypt FILE with a passphrase that is asked for on the terminal.",
)
@click.option(
    "--passphrase-file",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help=(
        "Encrypt FILE with the passphrase in this file, mode 0600.  [default: what opens the store]"
    ),
)
@click.option(
    "--no-encrypt", is_flag=True, help="Do not encrypt FILE, though the store is encrypted."
)
@pass_app
def export(app: App, /, ref: str, file: str, force: bool, **how: Any) -> int:
    """Write one checkpoint to one file that needs nothing else: criuctl import reads it into any
    store. Every byte is verified on the way. The file is compressed and has mode 0600. It gets its
    name when it is whole and durable, so an export that fails leaves nothing. An existing file is
    not replaced (exit 9) without --force.

    The file is encrypted if the store is, under its own key. The store's key file, or passphrase,
    opens the file. So the other host needs that (criuctl store key --export writes it). A person
    who gets the file with a separate key or passphrase learns nothing of the store. A file from a
    store that is not encrypted is not encrypted either, without --key-file, --passphrase or
    --passphrase-file.
    """
    target: Path | int = Path(file)
    if file == "-":
        if app.json:
            raise click.UsageError("--json and - both want standard output")
        if os.isatty(1):
            raise click.UsageError(
                "standard output is a terminal: name a file, or send it somewhere"
            )
        target = 1
        write_bytes(b"")  # ends here if standard output is closed, before anything is read
    from ...ops.transfer import export as export_checkpoint

    seal = _seal(**how)
    with app.reporting() as reporter:
        done = export_checkpoint(app.config, ref, target, reporter=reporter, seal=seal, force=force)
    body = done.to_dict()
    if isinstance(target, int):
        if not app.quiet:
            for line in _for_people(body).splitlines():
                tell(line)
        return 0
    app.emit(body, lambda: _for_people(body), brief=lambda: str(body["checkpoint"]))
    return 0

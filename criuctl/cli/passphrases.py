"""Passphrases on the terminal: typed, never shown, and never an argument, which other users could
read.
"""

from __future__ import annotations

import sys

import click

from ..errors import UsageError


def ask(prompt: str, *, twice: bool = False) -> bytes:
    """Prompt for a passphrase on the terminal; raise `UsageError` where there is none."""
    if not sys.stdin.isatty():
        raise UsageError(
            "--passphrase asks on a terminal, and there is none",
            hint="Use --passphrase-file FILE instead.",
        )
    typed = click.prompt(
        prompt, hide_input=True, confirmation_prompt="Once more" if twice else False, err=True
    )
    return str(typed).encode()

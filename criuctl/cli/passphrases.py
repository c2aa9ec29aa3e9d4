"""Passphrases on the terminal: typed, never shown, never an argument, which others could read."""

from __future__ import annotations

import sys

import click

from ..errors import UsageError


def ask(prompt: str, *, twice: bool = False) -> bytes:
    """What is typed there; `UsageError` where there is no terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "--passphrase asks on a terminal, and there is none",
            hint="Use --passphrase-file FILE instead.",
        )
    typed = click.prompt(
        prompt, hide_input=True, confirmation_prompt="Once more" if twice else False, err=True
    )
    return str(typed).encode()

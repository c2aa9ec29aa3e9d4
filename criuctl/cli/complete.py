"""Completion of session names and checkpoint references at the shell's prompt.

Quick or nothing: a store that does not answer within a second completes nothing, and no completion
ever prints an error: the user is in the middle of typing a line.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

from .app import App

PATIENCE = 1.0  # seconds that a person at a prompt can be made to wait


def _in_time(ask: Callable[[], list[CompletionItem]]) -> list[CompletionItem]:
    """Return the result of `ask`, or nothing if it fails or takes longer than `PATIENCE`."""
    answer: list[CompletionItem] = []

    def run() -> None:
        try:
            answer.extend(ask())
        except Exception:
            # No store, no key, no permission: the command itself reports that when it is run.
            answer.clear()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return [] if thread.is_alive() else answer


def _app(ctx: click.Context) -> App:
    return ctx.find_object(App) or App()


def checkpoint_ref(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of sessions; their numbered checkpoints after a name; ids after the first
    digit.
    """

    def ask() -> list[CompletionItem]:
        from ..ops.inspect import list_checkpoints

        items: dict[str, str] = {}
        for found in list_checkpoints(_app(ctx).config).checkpoints:
            summary = found.to_dict()
            numbered = f"{summary['session']}@{summary['number']}"
            if "@" in incomplete:
                items[numbered] = summary["created"]
            else:
                items[summary["session"]] = "newest checkpoint of this session"
                if len(incomplete) >= 2:
                    items[summary["id"]] = numbered
        return [
            CompletionItem(value, help=text)
            for value, text in items.items()
            if value.startswith(incomplete)
        ]

    return _in_time(ask)


def session_name(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of the sessions that have a checkpoint in the store."""

    def ask() -> list[CompletionItem]:
        from ..ops.inspect import list_checkpoints

        names = dict.fromkeys(
            found.to_dict()["session"] for found in list_checkpoints(_app(ctx).config).checkpoints
        )
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return _in_time(ask)


def store_key(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete labels of the keys that open the store, and fingerprints of those without a
    label.
    """

    def ask() -> list[CompletionItem]:
        from ..ops.store_keys import key_list

        found = key_list(_app(ctx).config)[0]
        return [
            CompletionItem(name, help=k.kind)
            for k in found
            if (name := k.label or k.fingerprint).startswith(incomplete)
        ]

    return _in_time(ask)


def running_session(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of the sessions that run on this host."""

    def ask() -> list[CompletionItem]:
        from ..host.registry import Registry

        records = Registry(_app(ctx).config).all()
        return [
            CompletionItem(r.name, help=f"PID {r.pid}")
            for r in records
            if r.name.startswith(incomplete) and r.alive()
        ]

    return _in_time(ask)


def session(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of the sessions of this host, with their states."""

    def ask() -> list[CompletionItem]:
        from ..ops.sessions import sessions

        known = sessions(_app(ctx).config)
        return [
            CompletionItem(s["session"], help=s["state"])
            for s in known
            if s["session"].startswith(incomplete)
        ]

    return _in_time(ask)


def process_id(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete PIDs of this host, after the first digit."""
    if not incomplete.isdigit():
        return []

    def ask() -> list[CompletionItem]:
        items = []
        for pid in sorted(
            (p for p in os.listdir("/proc") if p.isdigit() and p.startswith(incomplete)), key=int
        ):
            try:
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
                    items.append(CompletionItem(pid, help=comm.read().strip()))
            except OSError:
                continue  # it ended meanwhile
        return items

    return _in_time(ask)


def target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a PID after a digit, otherwise the name of a running session or of a configured
    tree.
    """
    if incomplete.isdigit():
        return process_id(ctx, param, incomplete)
    found = running_session(ctx, param, incomplete)
    known = {item.value for item in found}
    return found + _in_time(
        lambda: [
            CompletionItem(n)
            for n in _app(ctx).config.trees
            if n.startswith(incomplete) and n not in known
        ]
    )

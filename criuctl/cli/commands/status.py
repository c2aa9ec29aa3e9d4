"""``criuctl status``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ...report import utc_text
from ..app import App, pass_app
from ..pages import page
from ..sessions import command_words, name_argument, state_words
from ..text import age, facts, labels, printable, span


def _text(body: Mapping[str, Any]) -> str:
    rows = [
        ("session", f"{printable(body['session'])} ({body['id'][:12]})"),
        ("state", f"{state_words(body)}{', ' + age(body['since']) if body['since'] else ''}"),
        ("home", printable(body["home"])),
    ]
    if body.get("moved_to"):
        rows.append(("moved to", printable(body["moved_to"])))
    if body.get("reason"):
        rows.append(("reason", printable(body["reason"])))
    if body["pid"]:
        rows.append(("pid", str(body["pid"])))
    rows.append(("incarnation", str(body["incarnation"])))
    if body.get("forked_from"):
        rows.append(("fork of", printable(body["forked_from"])))
    if ends := (body.get("facts") or {}).get("ends"):
        rows.append(("ends", str(utc_text(ends))))
    if body.get("command"):
        rows.append(("command", printable(shlex.join(body["command"]))))
    if body.get("labels"):
        rows.append(("labels", labels(body["labels"])))
    if stored := body.get("checkpoint"):
        number = f"{stored['number']} " if stored["number"] is not None else ""
        old = f", {span(stored['age_s'])} old" if stored["age_s"] is not None else ""
        where = f" in {printable(stored['store'])}" if stored["store"] else ""
        rows.append(("checkpoint", f"{number}({stored['id'][:12]}{old}){where}"))
    if body.get("tracking") == "write-protect":
        rows.append(("tracking", "writes since the last snapshot"))
    if body.get("rows"):
        rows.append(
            ("terminal", f"{body['cols']}x{body['rows']}, output up to offset {body['offset']}")
        )
    if any((steps := body.get("steps") or {}).values()):
        counted = [f"{count} {state}" for state, count in steps.items() if count]
        rows.append(("steps", printable(", ".join(counted))))
    if foreground := body.get("foreground"):
        rows.append(("foreground", _foreground(foreground)))
    lease = body.get("lease")
    if lease:
        held = f", until {utc_text(lease['expires'])}" if lease.get("held") else ""
        words = f"{printable(lease['name'])} ({lease['kind']}, {lease['operator']}){held}"
        rows.append(("writes", words))
    rows += [
        ("limited", f"{limit['kind']} {printable(limit['name'])}: {limit['role']}")
        for limit in body.get("roles") or ()
    ]
    for operator in body["operators"]:
        words = (
            f"{printable(operator['name'])} ({operator['kind']}, {operator['operator']}): "
            f"{operator['role']}"
        )
        rows.append(("operator", words + (", attached" if operator["attached"] else "")))
    return facts(rows)


def _foreground(foreground: Mapping[str, Any]) -> str:
    """Return the program in the foreground, and what it does with the terminal."""
    words = [f"{command_words(foreground['argv'])} (PID {foreground['pid']})"]
    if foreground.get("at_prompt"):
        words.append("at its prompt")
    elif foreground["reading_tty"]:
        words.append("waits for input")
    if not foreground["echo"] and not foreground.get("at_prompt"):
        words.append("no echo")
    return ", ".join(words)


@page(
    examples=[
        ("All about a session:", "criuctl status build"),
        ("Its state alone, for a script:", "criuctl status build -q"),
        ("Who writes?", "criuctl status build --json | jq .lease"),
        ("What does its terminal wait for?", "criuctl status build --json | jq .foreground"),
    ],
    exits=[3, 10],
    see_also=["ls", "wait"],
)
@name_argument
@pass_app
def status(app: App, name: str) -> int:
    """Show the details of one session: its state, process, incarnation, exit code, terminal, and
    connected clients.

    The session's holder answers, so the answer is current. Without a holder (a tree that was dumped
    or restored by PID, a session that ended) it comes from this host's records and the kernel. The
    checkpoint is the last that this host stored or restored: its id, number, age, and the store
    that it is in.

    In the JSON, foreground is the program in the terminal's foreground: pid, argv, cwd, reading_tty
    (it sleeps until the terminal has input), echo (the terminal shows what is typed: not at a
    password prompt, nor in a line editor) and at_prompt (it is the session's shell, and waits for
    a command: known of bash, zsh, fish, sh and dash that criuctl run has started).
    """
    from ...ops.sessions import status as status_of

    body = status_of(app.config, name)
    app.emit(body, lambda: _text(body), brief=lambda: str(body["state"]))
    return 0

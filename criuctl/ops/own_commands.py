"""criuctl commands as separate processes, for servers.

Whatever freezes or makes a tree is run as if it was typed: it keeps its guarantees (no failure
loses the tree) also when the server is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CommandFailed
from ..proc import command
from ..proc.child import Child
from ..report import Reporter
from ..session.client.caller import Operator, variables


class OwnCommands:
    """Runs commands, and knows those under way."""

    def __init__(self, program: Sequence[str], reporter: Reporter) -> None:
        """Set up; `program` is this criuctl with the options that it was started with."""
        self._program, self._reporter = tuple(program), reporter
        self._children: set[Child] = set()
        self._ending = False

    async def run(self, argv: Sequence[str], operator: Operator | None = None) -> tuple[Any, int]:
        """Return JSON and exit code of a command that runs on behalf of `operator`, or of this
        server; `CommandFailed` if it printed no JSON.
        """
        if self._ending:
            raise CommandFailed("the server is ending")
        with tempfile.TemporaryFile() as out:
            child = command.spawn(
                [*self._program, "--json", *argv],
                stdout=out.fileno(),
                env=_environment(os.environ) | (variables(operator) if operator else {}),
                new_session=True,
            )
            self._children.add(child)
            try:
                await _ended(child)
            finally:
                self._children.discard(child)
            code = child.wait()
            out.seek(0)
            said = out.read()
        try:
            body = json.loads(said)
        except ValueError:
            last = child.stderr_tail().strip().splitlines()
            raise CommandFailed(
                f"criuctl {argv[0]} ended with {code}: {last[-1] if last else 'it said nothing'}"
            ) from None
        finally:
            child.close()
        return body, code

    async def close(self, *, interrupt: bool = True) -> None:
        """Start no more, and wait until those under way have ended.

        `interrupt`: they are interrupted first, as ^C would, and clean up.
        """
        self._ending = True
        children = list(self._children)
        for child in children:
            what = "clean up" if interrupt else "end"
            self._reporter.warning(f"waiting for criuctl (PID {child.pid}) to {what}")
            if interrupt:
                child.terminate()
        for child in children:
            while child.poll() is None:
                await asyncio.sleep(0.05)


async def _ended(child: Child) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.pidfd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(child.pidfd)


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this server: credentials of the store, its proxy, secrets that
    rules name (``secret: env:``).
    """
    # every child process gets these where necessary
    return {key: value for key, value in ours.items() if key != "PATH"}

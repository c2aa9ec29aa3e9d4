"""`criuctl acp` from its first message to its end: the agent's process, both ends, the signals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence

from ..config import Config
from ..errors import NotFound
from ..ops.environment import inherited
from ..proc import command
from ..proc.child import Child
from ..proc.line_streams import LineStreams, standard_streams
from ..report import Reporter
from .relay import Relay
from .terminals import Terminals

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 5.0  # seconds for the agent to end, when the editor is gone
_LOOK = 0.05


async def serve(
    config: Config, agent: Sequence[str], attach: Sequence[str], reporter: Reporter
) -> int:
    """Serve between the standard streams and the program `agent`; return its exit code.

    Without an agent, the program at the standard streams asks for terminals itself.  After
    a signal, return its number plus 128.  Terminals run on.
    """
    loop = asyncio.get_running_loop()
    ended_by: list[int] = []
    terminals = Terminals(config, os.path.basename(agent[0])[:60] if agent else "acp")
    with standard_streams() as (incoming, outgoing):
        ours = await LineStreams.open(incoming, outgoing)
        child, theirs = await _start(agent) if agent else (None, None)
        relay = Relay(theirs or ours, ours if theirs else None, terminals, attach, reporter)
        work = asyncio.create_task(relay.run())

        def end(number: int) -> None:
            ended_by.append(number)
            work.cancel()

        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, end, number)
        try:
            await work
        except asyncio.CancelledError:
            pass
        finally:
            terminals.close()
            if theirs is not None:
                theirs.close()
            code = 0 if child is None else await _ended(child)
    return 128 + ended_by[0] if ended_by else code


async def _start(agent: Sequence[str]) -> tuple[Child, LineStreams]:
    """Start the agent, in the environment of this program without criuctl's own secrets."""
    path = shutil.which(agent[0])
    if path is None:
        raise NotFound(f"{agent[0]}: no such command")
    from_us, to_agent = os.pipe()
    from_agent, to_us = os.pipe()
    try:
        child = command.spawn(
            [path, *agent[1:]], stdin=from_us, stdout=to_us, stderr=2, env=inherited(os.environ)
        )
    except BaseException:
        os.close(to_agent)
        os.close(from_agent)
        raise
    finally:
        os.close(from_us)
        os.close(to_us)
    return child, await LineStreams.open(from_agent, to_agent)


async def _ended(child: Child) -> int:
    """Wait until the agent has ended, whose input is closed; end it if it does not."""
    deadline = asyncio.get_running_loop().time() + _GRACE
    while child.poll() is None and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_LOOK)
    code = child.end() if child.poll() is None else child.wait()
    child.close()
    return code if code >= 0 else 128 - code

"""A holder hands its session over to a fresh program, of a newer criuctl perhaps.

Clients do not notice.  All that the holder knows goes through a memory file as JSON; sockets,
terminal and children belong to the process and stay.  What the tree prints meanwhile waits in the
terminal, what clients send waits in their sockets.  A child first tries whether the new program
starts and can read this format: a holder that is gone would be a lost session.  `launch.reexec` is
the other end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checkpointing import Checkpointing
from .clients import Clients
from .connection import Connection
from .helper_processes import HelperProcesses
from .kill import Kills
from .master import Master
from .operators import Refused
from .processes import exit_code
from .session_files import SessionFiles

FORMAT = 1
_BUSY = "a checkpoint, a restore or a kill is under way"


class Handover:
    """Replaces the program of one holder.

    `state` returns all that the holder knows; `watch_term` sets the handler of SIGTERM again;
    `more` returns more descriptors that stay.
    """

    def __init__(
        self,
        name: str,
        files: SessionFiles,
        clients: Clients,
        master: Master,
        helpers: HelperProcesses,
        kills: Kills,
        checkpointing: Checkpointing,
        state: Callable[[], dict[str, Any]],
        watch_term: Callable[[], None],
        more: Callable[[], list[int]],
    ) -> None:
        self._name, self._files, self._clients = name, files, clients
        self._master, self._helpers, self._kills = master, helpers, kills
        self._checkpointing, self._state, self._watch_term = checkpointing, state, watch_term
        self._more = more

    @property
    def busy(self) -> bool:
        """Whether something is under way that another program could not go on with."""
        return self._checkpointing.busy or self._kills.under_way > 0

    def begin(self, connection: Connection, message: dict[str, Any]) -> None:
        """Try the new program, then become it; the answer to the request comes before that."""
        code = Path(str(message.get("code") or Path(__file__).parents[3]))
        executable = str(message.get("executable") or sys.executable)
        entry = code / "criuctl" / "session" / "entry.py"
        argv = [executable, "-I", "-S", str(entry), self._name]
        request = message["id"]

        def checked(status: int) -> None:
            code, text = self._verdict(status)
            if text:
                connection.send({"id": request, "error": {"code": code, "message": text}})
                return
            connection.send({"id": request, "ok": True})
            self._become(argv)

        try:
            check = [*argv, "check", str(FORMAT), str(self._files.run_folder)]
            self._helpers.start(check, {}, checked)
        except OSError as error:
            text = f"the new program cannot be started: {error.strerror}"
            raise Refused("failed", text) from None

    def _verdict(self, status: int) -> tuple[str, str]:
        """Return code and text of an error, given the wait status of the check; "": none."""
        if status != 0:
            return "failed", f"the new program does not start (status {exit_code(status)[0]})"
        if self.busy:
            return "busy", _BUSY
        return "failed", self._files.unwritable()

    def _become(self, argv: list[str]) -> None:
        """Execute the new program; return only if that fails."""
        self._files.log.flush()
        memory = os.memfd_create("criuctl-holder", os.MFD_CLOEXEC)
        with open(memory, "w", closefd=False) as file:
            json.dump({"format": FORMAT} | self._state(), file)
        master = [self._master.fd] if self._master.fd >= 0 else []
        fds = [*self._clients.descriptors(), *master, *self._more(), memory]
        for fd in fds:
            os.set_inheritable(fd, True)
        # Handlers end with the exec, and the default action would end the session.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        arguments = ["reexec", str(memory), str(self._files.run_folder)]
        try:
            os.execve(argv[0], [*argv, *arguments], dict(os.environ))
        except OSError as error:
            for fd in fds:
                os.set_inheritable(fd, False)
            os.close(memory)
            self._watch_term()
            # The holder's own log.
            print(f"re-exec failed: {error}", file=sys.stderr)  # noqa: T201

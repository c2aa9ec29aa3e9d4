"""The new program of a holder that replaces itself: become what the old one was, and go on.

`holder.handover` writes the memory file that is read here.  Values that an older version did not
write have defaults.
"""

from __future__ import annotations

import json
import sys

from ... import __version__
from ..holder.base64_text import decoded
from ..holder.holder import Holder
from ..holder.session_files import SessionFiles
from ..holder.session_state import Identity
from ..screen.modes import Modes

_READABLE = (1,)


def check(version: int) -> None:
    """End this program, a child of the old one: status 0 if it can read this format."""
    sys.exit(0 if version in _READABLE else 1)


def resume(memory: int) -> None:
    """Become what the memory file describes, and run; return when the holder has ended."""
    with open(memory) as file:
        file.seek(0)
        state = json.load(file)
    modes = Modes.from_dict(state["modes"][0])
    modes.carry = decoded(state["modes"][1])
    identity = Identity(**state["identity"])
    holder = Holder(identity, SessionFiles.reopen(state, identity.id), modes)
    holder.restore(state)
    holder.events.emit("reexec", version=__version__)
    holder.run()

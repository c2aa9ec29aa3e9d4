"""Clients of a holder: the Python API, and attaching a terminal.

- `session`: `Session`, one connection to a holder: all that the command line does with a session.
- `wire`: the client's end of the wire protocol: requests out; output, events and answers in.
- `attach`: show a session in this terminal and type into it.
- `reconnect`: connect again after a lost connection, or to the host a session has moved to.
- `remote`: connect to a session on another host through ssh.
- `local_terminal`: the terminal that the user of `attach` sits at.
- `keyboard`: find the detach key, and a terminal's own reports, in what was typed.
- `keys`: names of keys, and the bytes that a terminal sends for them.
- `notices`: lines about the session that an attached user is shown.
- `commands`: follow commands that the holder runs; `typed_commands`: type one to a shell behind
  another program.
"""

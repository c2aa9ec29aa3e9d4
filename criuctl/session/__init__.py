"""Sessions: a holder process for each, its wire protocol, and its clients.

Nothing is imported here, so that each program loads only what it needs.  The packages, from the
highest to the lowest; a module imports only from its own package and from those below it:

- `launch`: start a holder, as a daemon or in place of an older one, and start a session's tree.
- `client`: connect to a holder, attach a terminal, type, follow a session to another host.
- `holder`: the program that owns the terminal, the output log and the processes of one session.
- `screen`: what a terminal shows after some output, and which modes and queries are in it.

Shared by all of them:

- `protocol`: the wire protocol's frames and numbers; PROTOCOL.md is its reference.
- `names`: names of sessions, their folders and sockets.
- `sessions`: the sessions of this host, read from the state files of their holders.
- `terminal`: new pseudo-terminals, and the guard over what line disciplines hold.
- `entry`: the program of a holder.  Holders of older versions start it by this very path.
"""

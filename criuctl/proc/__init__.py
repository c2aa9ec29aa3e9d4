"""What the kernel says and does: processes, namespaces, sockets, terminals, child processes.

Nothing here knows of CRIU or of checkpoints.  Readers take a PID as criuctl's own procfs shows it,
cope with processes that vanish while they are read, and never change anything; what changes
something says so.
"""

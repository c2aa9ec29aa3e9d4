"""What the kernel says and does: processes, namespaces, sockets, terminals, child processes.

Nothing here knows about CRIU or checkpoints. Functions that read take a PID as criuctl's own procfs
shows it, handle processes that vanish while they are read, and change nothing. A function that
changes something says so.
"""

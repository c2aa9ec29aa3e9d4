"""Start a holder, and start the tree of a session.

- `program`: the command line of a holder, which `session.entry` runs.
- `daemon`: start a holder as a daemon and wait until its session stands; runs in the caller.
- `fresh_start`: a new holder: read the specification, start the tree, listen, answer the caller.
- `reexec`: replace a holder by a fresh program, of a newer criuctl perhaps.
- `plain_spawn`: what a holder asks of a spawner, and the spawner without namespaces.
- `shell_hooks`, with the folder `shells`: let a shell report its prompts, and take commands.
- `spawn`: the spawner of criuctl's sessions: namespaces, init, the command on a terminal.
"""

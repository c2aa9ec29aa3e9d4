"""The holder: a small process for each session, outside its tree.

It owns the master of the session's terminal, its output log and its socket; it freezes, signals and
ends the session's processes, reaps them, and keeps the exit status.  One thread, one event loop.

The state of a session:

- `holder`: the holder itself, which connects the parts below.
- `output_log`, `timeline`, `audit_log`: the files of a session: output, its times, who did what.
- `master`: the terminal's master: output into the log, input out of a queue.
- `terminal_queries`: answer a program's terminal queries while no terminal is attached.
- `processes`, `cgroup`: the processes of a session: find, signal, freeze, reap.
- `operators`, `lease_timer`: who is connected, who may write, and for how long.
- `status_report`: the answer to `status`, and the state file.

What happens over time:

- `event_loop`: epoll and timers.
- `root_watch`: learn how the tree's first process ended.
- `kill`: end every process of a session.
- `self_fence`: freeze the session when its home is no longer confirmed.
- `checkpointing`: take part in dumps and restores.
- `handover`: replace the holder by a fresh program.
- `helper_processes`: programs that a holder starts as its own children, CRIU for example.

Requests of clients:

- `connection`: one client: what was received, what waits to be sent.
- `requests`: check and answer the requests of clients.
- `request_values`: check single values of requests.
- `observe_operations`, `write_operations`, `control_operations`: the operations of the protocol.
"""

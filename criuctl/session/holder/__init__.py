"""The holder: a small process for each session, outside its tree.

It owns the master of the session's terminal, its output log and its socket; it freezes, signals and
ends the session's processes, reaps them, and keeps the exit status.  One thread, one event loop.

`holder` makes the parts and gives each what it needs.  A part owns its state, and knows only parts
below it (pyproject.toml has the order); what happens above it is reported through a callback.  On a
re-exec each part writes its share of the state (`to_state`) and takes it over again (`restore`).

What a session is:

- `session_state`: identity and state of the session.
- `session_files`: its folders and files: `output_log`, `timeline` (times of the output),
  `audit_log`.
- `master`: the terminal's master: output into the log, input out of a queue; `signal_keys`: when
  input may follow ^C.
- `commands`: the records of commands.  `shell_commands` runs them in the session's shell,
  `new_commands` next to it, with `command_files`; `commanding` makes and keeps all of these.
- `terminal_queries`: answer a program's terminal queries while no terminal is attached.
- `processes`, `cgroup`: the processes of a session: find, signal, freeze, reap.
- `foreground_report`: the program in the terminal's foreground, and what it waits for.
- `operators`, `lease_timer`: operators, their roles, and the write lease.
- `events`: number events, send them to subscribers, remember the last ones.
- `status_report`: the answer to `status`, and the state file.

What happens over time:

- `event_loop`: epoll and timers.
- `steps`: the journal of durable steps, and which attempts run; `step_replication`: steps that wait
  for the store; `step_socket`: how the session's own processes reach both.
- `root_watch`: learn how the tree's first process ended.
- `kill`: end every process of a session.
- `self_fence`: freeze the session when its home is no longer confirmed.
- `time_to_live`: end a fork when its time is over.
- `checkpointing`: take part in a dump.
- `adoption`: take a restored tree back.
- `helper_processes`: programs that a holder starts as its own children, CRIU for example.
- `handover`: replace the holder by a fresh program; `base64_text` is for its JSON.
- `lifetime`: end the holder when it is no longer needed.

Clients and their requests:

- `clients`: the listening socket, and all connections.
- `connection`: one client: what was received, what waits to be sent.
- `requests`: check the requests of clients, and answer them; `replies` are error answers.
- `request_values`: check single values of requests.
- `waits`: the requests `wait` that have no answer yet.
- `presence_operations`: `hello`, `status`, `audit`, `heartbeat`, `bye`.
- `output_operations`: `attach`, `detach`, `read`.
- `event_operations`: `subscribe`, `wait`, `cancel`.
- `write_operations`: input, window size, the lease, roles.
- `tree_operations`: `signal`, `pause`, `resume`, `halt`, `kill`, fencing.
- `command_operations`: start, look at and end commands.
- `step_operations`: steps of operators, dumps, restores and supervisors.
- `holder_operations`: checkpoints, `adopt`, `spawn`, `moved`, `reexec`, `shutdown`.
"""

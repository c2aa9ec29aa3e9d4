"""A restore: a checkpoint becomes a running process tree again, or nothing.

`story` reads from top to bottom and calls the others in this order:

- `request`: what is asked for.  `partners`: what the restore works together with.
- `source`: the checkpoint, found and expected (`newest`).
- `observation`, `observe`, `host_facts`: everything on this host that the plan depends on.
- `plan`, `connection_plan`: what will be done; pure functions of the manifest and the facts.
- `home`: the session's lease, its new incarnation, its record on this host.
- `materialise`, `lazy_memory`, `page_feeder`, `direct_memory`: images and memory.
- `restoring`: CRIU's part, with what is made around it (`surroundings`, `early_tasks`).
- `placed`: the restored tree before its first instruction: compared (`comparison`), completed,
  its connections handed back (`hand_back`).
- `outcome`: the answer, and what remains to be cleaned up.
"""

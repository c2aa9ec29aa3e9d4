"""What criuctl does: the modules here are its operations, one story per file, as a command's name
has it.

What a story is made of lies in a package beside it, by subject.  Those use each other and the nouns
of this host (`registry`, `host`, `target`, `holders`, `hooking`); a story they use where one
operation is a part of another: a recovery restores.

- `checks`: what CRIU refuses, found before anything is touched
- `dumps`: the steps of a dump, from the look before it to the manifest
- `restores`: the steps of a restore: its plan, memory, CRIU's part, connections handed back
- `openfiles`: files of a tree: recorded, judged by the time of the restore, put back, laid over
  this host's
- `resources`: what else of the kernel CRIU leaves to its caller, each kind at both ends: names,
  pipes, locks, timers, terminals
- `moving`: the two ends of a migration
- `supervising`: homes, leases and fences; what a supervisor sees and decides
- `scheduling`: what is done at which time, to which sessions
- `storing`: what is in a store: rules of retention, comparisons, keys
- `journal`: what was done on this host: events, and what becomes of them
- `failures`: what CRIU's messages mean
"""

"""The operations of criuctl, one module per operation, named like its command.

The steps of an operation are in the packages next to it, by subject. Those use each other and the
modules about this host (`registry`, `host`, `target`, `holders`, `hooking`). An operation uses
another one only as a part of itself: a recovery restores.

- `moving`: the two ends of a migration
- `supervising`: homes, leases and fences; a supervisor's observations and decisions
- `scheduling`: which operations run at which time, on which sessions
- `storing`: the contents of a store: retention rules, comparisons, keys
"""

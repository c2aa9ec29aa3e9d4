"""Durable steps: what a step is, and the file that remembers it.

A step is a piece of work inside a session, with an id that its program chooses and a key that is
the same before and after a restore. `states` has the rules, without files and clocks; `journal` is
the append-only file. The holder keeps the journal outside the memory that is dumped, so a restore
never rolls it back.

This package uses the standard library only and stands on the lowest floor: the holder, which is
small and below `host`, needs the journal; so do the store's replica above it and the commands. What
acts on sessions (`ops.steps`, `cli.commands.step`) stands above.
"""

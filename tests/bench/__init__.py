"""The bench: criuctl next to the other ways to do the same, in the same run, on the same tree.

`scripts/bench` is its door.  Who does what:

- `program`: the tree that is dumped (target.c), which ticks, changes part of its memory and
  verifies it on request;
- `commands`: runs a program to its end and takes its time and the memory of it and its children;
- `ways`: the ways to dump and to restore a tree: criuctl, plain ``criu``, and ``criu`` with tar,
  zstd and a copy, each with places to store to (`places`: a folder, Ceph's S3 gateway);
- `cases`: what is measured; the ways take turns in every round (A B A B), so that a slow minute
  hits all of them;
- `report`: samples to medians and ratios, bounds, the table and the JSON.

Rules: one untimed round goes first; `os.sync` before each timed step keeps the writing of one out
of the time of the next; after every restore the tree verifies its memory, and a way that fails is
out, reported, and makes the bench end with 1.  Numbers never do.  Everything that was started is
ended and every folder is removed on every path out; a tree that is left behind all the same ends by
itself.
"""

from __future__ import annotations

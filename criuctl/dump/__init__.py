"""A dump: a running process tree becomes a checkpoint in a store.

`story` reads from top to bottom and calls the others in this order:

- `job`: what is asked for.  `subject`: which session the tree is; nothing else may dump it.
- `preflight` and `checks`: every obstacle, before anything is touched.
- `parts`: the tree's terminals, connections, files and devices, each with its own state.
- `destination`: the store, and the session's lease; `delivery`: another host's store.
- `precopy`, `devices`: what is done ahead, while the tree runs.
- `freeze`: CRIU stops the tree, and what must be seen while it stands still is taken.
- `commit`: the manifest is put together (`manifest_of_tree`) and stored: the commit point.
- `ending`, `after_commit`: the tree runs on, or has ended; nothing that fails now is a failed dump.

What is known of the tree is kept in these objects, in the order in which they are made:

=============  ==================  =================================================================
object         made by             content
=============  ==================  =================================================================
``Subject``    `subject`           the session that the tree is, and its root's PID
``Scene``      `checks.scene`      what the checks of the preflight look at; the tree runs
``TreeParts``  `parts`             the subsystems and repairs that take part, with their state
``Seen``       `freeze`            processes, descriptors, connections of the frozen tree
``Collected``  `freeze`            files and private memory, read by another thread meanwhile
``Taken``      `manifest_of_tree`  all of this, as the manifest is going to describe it
=============  ==================  =================================================================
"""

"""Parts of operations on a group of sessions: the members, and how they proceed together."""

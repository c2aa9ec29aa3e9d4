"""External connections: what is recorded of them, what becomes of them, and how they are given
back.

A connection whose other end is outside the tree has its other half in another kernel; nothing can
keep that half but its owner.  `record` writes down what a tree holds, `rules` decides a policy for
each connection (``keep``, ``reconnect``, ``hangup``, ``refuse``), and `protocols` speak to the
peer: at the freeze to learn what the session holds there, at the restore to connect the same socket
again and set it up anew.  `survey` is the dump's way through all this (`detect` tells protocols
apart, `drain` waits, `inspecting` asks), `reconnect` the restore's.
"""

"""External connections: their records, their policies, and how they are given back.

The other half of a connection to outside the tree is in another kernel; only its owner can keep
that half. `record` describes what a tree holds, `rules` decides a policy for each connection
(``keep``, ``reconnect``, ``hangup``, ``refuse``), and `protocols` speak to the peer: at the freeze
to learn the session state there, at the restore to connect the same socket again and set up the
session. `survey` does all this for a dump (`detect` recognises protocols, `drain` waits,
`peer_inspection` asks), `reconnect` for a restore.
"""

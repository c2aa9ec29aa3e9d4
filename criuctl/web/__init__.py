"""A page in the browser: the sessions of this host, their checkpoints, and their live terminals.

`server` binds and ends, `access` checks requests, `views` answers questions from `ops`, `live`
reports changes, `bridge` connects a WebSocket to the session's holder, `actions` runs what changes
something. The page itself is in ``static``: ES modules and CSS as written, without a build. Nothing
here decides what a person may do to a session: roles and the write lease are the holder's, and a
separate criuctl process makes every change to a tree.
"""

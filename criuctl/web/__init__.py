"""A page in the browser: the sessions of this host, their checkpoints, and their live terminals.

`server` binds and ends, `access` decides who may ask, `views` answers questions with what `ops`
knows, `live` tells of changes, `bridge` carries a terminal between a WebSocket and the session's
holder, `actions` runs what changes something.  The page itself is in ``static``: ES modules and CSS
as written, without a build.  Nothing here decides what a person may do to a session: roles and the
write lease are the holder's, and what changes a tree is a criuctl of its own.
"""

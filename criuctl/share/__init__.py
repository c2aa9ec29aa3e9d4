"""Sharing a session with a guest elsewhere, by way of a host that is not trusted: the relay.

A keeper process on the session's host holds two layers. The outer one is a reverse tunnel of the
system's ssh to the relay (`tunnel`). Inside it, guest and keeper speak ssh with keys of their own
(`server`, `guest`), so the relay carries ciphertext. The guest speaks
the holder's protocol, and few requests pass (`requests`). One line, which a person pastes, has all
that the guest needs (`invitation`).
"""

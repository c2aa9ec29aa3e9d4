"""What can go wrong in a bench."""

from __future__ import annotations


class BenchFailed(Exception):
    """A way did not do what it should, or something that is needed is missing; the message is for
    people.
    """

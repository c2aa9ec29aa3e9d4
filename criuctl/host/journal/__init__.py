"""The journal of this host: every operation that changed something is an event, with its end and
its cause.
"""

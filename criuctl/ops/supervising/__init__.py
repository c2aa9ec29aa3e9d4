"""Homes, leases and fences, and what a supervisor sees, decides and does; the story is
`criuctl.ops.supervise`.
"""

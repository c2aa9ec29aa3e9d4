"""Homes, leases and fences, and the observations, decisions and actions of a supervisor;
`criuctl.ops.supervise` runs it.
"""

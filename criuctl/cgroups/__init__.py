"""Control groups of a dumped tree: which its processes are in, and how a restore makes and joins
them.
"""

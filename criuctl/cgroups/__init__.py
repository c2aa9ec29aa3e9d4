"""Control groups of a dumped tree: those of its processes, and how a restore makes and joins
them.
"""

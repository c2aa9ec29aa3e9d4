"""The regular files of a tree: recorded while it is frozen, judged by the time of the restore, put
back or overlaid.
"""

"""The two ends of a migration: what the tree needs, its delivery, its arrival, and what either end
has written down of it.
"""

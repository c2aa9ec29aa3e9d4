"""Writes to memory in every way, while it is snapshotted, restored, copied: ``scripts/
memory-campaign``.
"""

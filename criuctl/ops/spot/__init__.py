"""Machines that a cloud takes away at short notice: the notice, what is worth storing first, and
the watch that stores it.
"""

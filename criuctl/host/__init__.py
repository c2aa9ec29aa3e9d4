"""What this host knows: its sessions, their leases and moves, locks, events, and explanations of
failures.
"""

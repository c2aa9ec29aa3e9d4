"""What CRIU leaves to its caller, a kind of the kernel's per module: taken at the dump, and given
back at the restore.
"""

"""Namespaces: what CRIU leaves to its caller, taken at the dump and given back at the restore; one
module per subject.
"""

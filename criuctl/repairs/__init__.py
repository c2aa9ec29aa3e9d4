"""Repairs of what CRIU loses or mishandles: one file for each; `base` has the contract, `registry`
the order.

Two files are no repairs themselves: `open_files` is shared by those of descriptors, and
`call_time_limits` is the part of `interrupted_calls` that has to look before the freeze.
"""

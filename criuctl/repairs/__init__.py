"""Repairs of what CRIU loses or mishandles: one file for each; `base` has the contract, `registry`
the order.
"""

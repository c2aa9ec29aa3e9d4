"""What CRIU loses or mishandles, and criuctl puts right: one file for each; `base` has the
contract, `registry` the order.
"""

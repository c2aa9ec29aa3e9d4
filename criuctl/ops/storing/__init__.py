"""What is in a store: which checkpoints to keep, how two of them differ, what they come to, who can
read them.
"""

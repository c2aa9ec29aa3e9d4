"""The content of a store: comparisons of checkpoints, growth, durations, keys."""

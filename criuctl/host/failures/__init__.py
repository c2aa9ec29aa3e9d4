"""What CRIU's messages mean, and what to do."""

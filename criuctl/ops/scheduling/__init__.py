"""What is done at which time, and to which sessions and configured trees."""

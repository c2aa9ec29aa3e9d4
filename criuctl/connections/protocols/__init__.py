"""The application protocols that criuctl can bring back to life on a socket; `base` is what one must offer."""

"""criuctl keeps live executions alive: checkpoint, store, move and restore Linux process trees."""

__version__ = "0.1.0"

__all__ = ["__version__"]

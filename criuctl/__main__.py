"""``python -m criuctl`` is the same program as the ``criuctl`` on the PATH."""

from __future__ import annotations

from .cli.main import program

if __name__ == "__main__":
    program()

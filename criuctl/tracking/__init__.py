"""The short freeze: a tree is frozen for as long as it takes to read what it wrote last.

- `memory.TrackedMemory`: private memory is read and stored in rounds while the tree runs; the
  kernel shows what was written to since (`criuctl.proc.written_pages`), and only that is read
  again. CRIU, which dumps all else, finds no pages there (`criuctl.criu.scan_hook`).
- `assembly`: the pages that were read, and those that CRIU has sent, put together to the memory of
  a checkpoint, as if CRIU had sent all of them.

What is not certain counts as written, and what cannot be tracked is left to CRIU.
"""

from __future__ import annotations

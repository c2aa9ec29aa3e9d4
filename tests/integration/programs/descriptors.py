"""More descriptors than a program may usually have: it has raised its limit, as servers do."""

from __future__ import annotations

import fcntl
import os
import resource

from animal import Check, serve

COUNT = 1500
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
limits = (max(soft, min(2 * COUNT, hard)), hard)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
pipes = [os.pipe() for _ in range(COUNT // 2)]
# the kernel counts all pipes of a user together: leave room for those of other tests
for _one, other in pipes:
    fcntl.fcntl(other, fcntl.F_SETPIPE_SZ, 4096)


def check(found: Check) -> None:
    found.equal("limits", resource.getrlimit(resource.RLIMIT_NOFILE), limits)
    for one, other in pipes:
        os.write(other, b"x")
        found.equal(f"pipe {one}", os.read(one, 10), b"x")


serve(check)

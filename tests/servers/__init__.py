"""Real S3 servers for tests and benchmarks, each a context manager that leaves nothing behind.

    with radosgw() as server:
        server.make_bucket("b")
        run(["criuctl", "dump", "--store", "s3://b/x", ...], env={**os.environ, **server.env})

`radosgw` (Ceph's gateway over one monitor and one OSD) is the reference: it honours conditional
writes and checks signatures and digests.  `rclone` is the weak one: it ignores write conditions.
Both listen on free ports of 127.0.0.1, keep their data in a temporary folder and are ended in
order; should the tests be killed, the kernel ends the servers too (``setpriv --pdeathsig``).
`FaultProxy` stands between a client and any of them and spoils chosen requests.  `servers.fixtures`
has one of each for a whole test session.
"""

from __future__ import annotations

from .common import S3Server
from .proxy import FaultProxy
from .radosgw import RadosGateway, radosgw
from .rclone import RcloneServer, rclone

__all__ = ["FaultProxy", "RadosGateway", "RcloneServer", "S3Server", "radosgw", "rclone"]

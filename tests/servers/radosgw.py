"""Ceph's S3 gateway with one monitor and one OSD on a sparse file: the reference server.

Six seconds from nothing to serving, about 135 MB idle.  Authentication inside the cluster is off
and everything listens on 127.0.0.1; towards S3 clients signatures are checked as ever.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .common import Daemon, S3Server, ServerFailed, accepts, free_ports, need, tool

_ACCESS, _SECRET = "testkey", "testsecret1234"
_PACKAGES = "the Debian packages radosgw, ceph-osd and ceph-mon"
_ATTEMPTS = 3  # a port that was free may be taken a moment later

# osd_class_update_on_start and osd_crush_update_on_start start helpers that fail outside an
# installed cluster and then kill the OSD.  paxos_propose_interval and the small numbers are for a
# quick start.  A gateway that is killed is forgotten after osd_client_watch_timeout: until then (30
# s by default) its successor waits for it to acknowledge every change of a bucket.
_CONF = """\
[global]
fsid = {fsid}
mon_host = v1:127.0.0.1:{mon_port}
ms_bind_msgr2 = false
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
paxos_propose_interval = 0.05
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
mon_data_avail_warn = 2
run_dir = {folder}/run
admin_socket = {folder}/run/$name.asok
log_file = {folder}/log/$name.log
log_to_stderr = false
crash_dir = {folder}/log
heartbeat_file =
osd_client_watch_timeout = 4
objecter_tick_interval = 0.5
keyring = {folder}/keyring
[mon]
mon_data = {folder}/mon
[osd]
osd_data = {folder}/osd
osd_objectstore = bluestore
bluestore_block_size = {block}
bluestore_cache_autotune = false
bluestore_cache_size = 134217728
osd_class_update_on_start = false
osd_crush_update_on_start = false
osd_op_num_shards = 2
bdev_aio = true
[client.rgw.a]
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{rgw_port}
rgw_gc_obj_min_wait = 10
rgw_gc_processor_period = 10
rgw_gc_processor_max_time = 10
rgw_thread_pool_size = 128
rgw_dns_name =
rgw_enable_ops_log = false
rgw_crypt_require_ssl = false
rgw_verify_ssl = false
"""


@dataclass
class RadosGateway(S3Server):
    """A running gateway with its cluster."""

    daemons: dict[str, Daemon] = field(default_factory=dict)
    # those that `add_user` made, with their keys
    users: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def ceph_env(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self.folder / "ceph.conf")}

    def kill_gateway(self) -> None:
        """kill -9 of the gateway alone; what it acknowledged is in the OSD."""
        self.daemons["rgw"].kill()

    def start_gateway(self) -> None:
        """Start the gateway (again), on the same port."""
        self._start("rgw", "radosgw", "-f", "-n", "client.rgw.a")
        self.daemons["rgw"].wait_until(lambda: accepts(self.port))

    def add_user(self, name: str) -> tuple[str, str]:
        """A further user, who owns nothing: its access key and secret key."""
        made = self._tool(
            "radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}"
        )
        key = json.loads(made)["keys"][0]
        self.users[name] = key["access_key"], key["secret_key"]
        return self.users[name]

    def set_quota(self, user: str, max_bytes: int) -> None:
        """Let `user` (``test`` is the main one) store no more than `max_bytes`; -1 lifts it."""
        state = "disable" if max_bytes < 0 else "enable"
        self._tool(
            "radosgw-admin",
            "quota",
            "set",
            "--quota-scope=user",
            f"--uid={user}",
            f"--max-size={max_bytes}",
        )
        self._tool("radosgw-admin", "quota", state, "--quota-scope=user", f"--uid={user}")

    def start_cluster(self, mon_port: int, block: int) -> None:
        """Make the cluster's files and bring everything up."""
        for name in ("log", "mon", "osd", "rgw", "run"):
            (self.folder / name).mkdir()
        (self.folder / "keyring").touch()
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        (self.folder / "ceph.conf").write_text(
            _CONF.format(
                fsid=fsid, mon_port=mon_port, rgw_port=self.port, folder=self.folder, block=block
            )
        )
        monmap = str(self.folder / "monmap")
        self._tool(
            "monmaptool",
            "--create",
            "--addv",
            "a",
            f"[v1:127.0.0.1:{mon_port}]",
            "--fsid",
            fsid,
            monmap,
        )
        self._tool("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._start("mon", "ceph-mon", "-f", "-i", "a")
        self.daemons["mon"].wait_until(lambda: accepts(mon_port))
        self._tool("ceph", "--connect-timeout", "30", "osd", "new", osd)
        self._tool("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._tool("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=h0")
        self._start("osd", "ceph-osd", "-f", "-i", "0")
        self.daemons["osd"].wait_until(self._osd_is_up)
        user = [
            "user",
            "create",
            "--uid=test",
            "--display-name=test",
            f"--access-key={_ACCESS}",
            f"--secret={_SECRET}",
        ]
        self._tool("radosgw-admin", *user)
        self.start_gateway()

    def _osd_is_up(self) -> bool:
        try:
            return bool(
                json.loads(self._tool("ceph", "osd", "stat", "-f", "json"))["num_up_osds"] == 1
            )
        except ServerFailed:
            # a monitor that has just started may refuse a question; asked again until the time is
            # over
            return False

    def stop(self) -> None:
        """End everything; the OSD needs the monitor to end in order, so that one goes last."""
        for name in ("rgw", "osd", "mon"):
            if name in self.daemons:
                self.daemons.pop(name).stop()

    def _start(self, name: str, program: str, *args: str) -> None:
        log = self.folder / "log" / f"{name}.out"
        self.daemons[name] = Daemon(name, [need(program, _PACKAGES), *args], log, self.ceph_env)

    def _tool(self, program: str, *args: str) -> str:
        return tool([need(program, _PACKAGES), *args], self.ceph_env)


@contextmanager
def radosgw(*, block: int = 8 << 30) -> Iterator[RadosGateway]:
    """A gateway with an empty cluster that holds up to `block` bytes; all of it is gone
    afterwards.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        # Paths of unix sockets are short, so is the folder's.
        with tempfile.TemporaryDirectory(prefix="s3-rgw-", dir="/tmp") as folder:
            mon_port, rgw_port = free_ports(2)
            server = RadosGateway(f"http://127.0.0.1:{rgw_port}", _ACCESS, _SECRET, Path(folder))
            try:
                try:
                    server.start_cluster(mon_port, block)
                except ServerFailed:
                    if attempt == _ATTEMPTS:
                        raise
                    continue
                yield server
                return
            finally:
                server.stop()

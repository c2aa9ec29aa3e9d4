"""CRIU's options for a dump and for a restore, each with its reason.

A user of plain CRIU must give up to a dozen options, depending on what the tree holds. Most are
harmless when not needed, so they are always on; the caller computes the rest from the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from . import schema

LOG_NAME = "criu.log"
CONFIG_NAME = "criu.conf"
# "info": names the descriptor that an error is about; "debug" would log every page run
LOG_LEVEL = 3
# "warning": when many processes are restored at once, each would wait for the others to write into
# the log
_QUIET = 2
_GHOST_MAXIMUM = (1 << 32) - 1  # the option is an unsigned 32-bit number


class DumpOptions(Struct, frozen=True):
    """The options that differ between dumps."""

    pid: int  # root of the tree, as CRIU sees it
    leave_running: bool = False
    shell_job: bool = False  # session or group leader is outside the tree
    external: Sequence[str] = ()  # resources that come from outside again at restore
    # CRIU saves the mount namespace, with every mount coming from outside again
    external_mounts: bool = False
    timeout: int = 30  # seconds that freezing may take
    # descriptor of the control group that has frozen the tree already
    freezer: int | None = None
    # a write lease on a file exists (F_SETLEASE): CRIU may not open the file, as it does for a
    # build-id
    leased: bool = False
    # lock TCP connections in the firewall as they are saved; not needed without connections
    shield: bool = True


class RestoreOptions(Struct, frozen=True):
    """The options that differ between restores."""

    shell_job: bool = False
    lazy: bool = False
    # folder of control group hierarchies in which CRIU makes those of the tree's groups that are
    # gone
    groups: str | None = None
    inherit: Mapping[str, int] = field(default_factory=dict)  # key -> descriptor
    root: str | None = None  # mount point on which CRIU builds a saved mount namespace
    crowded: bool = False  # many processes are restored
    mounted_terminals: bool = False  # terminals are bind mounted in a saved mount namespace


def _common(images: str) -> Any:
    rpc = schema.rpc()
    opts = rpc.criu_opts(images_dir_fd=-1, images_dir=images)
    opts.log_level = LOG_LEVEL
    opts.log_file = LOG_NAME
    opts.notify_scripts = True  # the driver works inside the notifications
    # Dump: connections are always recorded whole, their policy is decided at restore. Restore:
    # needed as soon as one image holds an established connection.
    opts.tcp_established = True
    # iptables would need a helper program; nftables is inside CRIU's own libraries.
    opts.network_lock = rpc.NFTABLES
    opts.file_locks = True  # flock, fcntl, leases: refused without
    opts.ext_unix_sk = True  # datagram sockets to the outside (syslog): refused without
    opts.link_remap = True  # a deleted name of a file that has other names: refused without
    opts.evasive_devices = False
    return opts


def dump_options(images: str, page_socket: int, options: DumpOptions) -> Any:
    """Return the RPC message for a dump whose pages go to descriptor `page_socket`."""
    opts = _common(images)
    opts.pid = options.pid
    opts.leave_running = options.leave_running
    # connections not accepted yet: lost, not refused; the preflight warns
    opts.tcp_skip_in_flight = True
    # deleted files that are still open, however large; the preflight reports them
    opts.ghost_limit = _GHOST_MAXIMUM
    opts.shell_job = options.shell_job
    if not options.shield:
        opts.network_lock = schema.rpc().SKIP
    opts.ps.fd = page_socket
    opts.ps.port = 0
    opts.timeout = options.timeout
    if config_text(options):
        opts.config_file = f"{images}/{CONFIG_NAME}"
    opts.external.extend(options.external)
    if options.freezer is not None:
        # CRIU seizes the frozen tasks there, thaws the group when it has all of them, and freezes
        # it before it lets go.
        opts.freeze_cgroup = f"/proc/self/fd/{options.freezer}"
    _external_mounts(opts, options.external_mounts)
    return opts


def config_text(options: DumpOptions) -> str:
    """Return the options that CRIU takes only from a file among the images; "" for none."""
    return "file-validation filesize\n" if options.leased else ""


def _external_mounts(opts: Any, wanted: bool) -> None:
    """Set CRIU's ``--external mnt[]:ms``: bind mounts, also shared and slave ones, are found by
    path.
    """
    if wanted:
        opts.auto_ext_mnt = opts.ext_sharing = opts.ext_masters = True


def restore_options(images: str, options: RestoreOptions) -> Any:
    """Return the RPC message for a restore from the folder `images`."""
    rpc = schema.rpc()
    opts = _common(images)
    if options.crowded:
        opts.log_level = _QUIET
    opts.shell_job = options.shell_job
    opts.lazy_pages = options.lazy
    # Pages are punched out of the tmpfs as they are placed: the peak is one copy of the memory, not
    # two.
    opts.auto_dedup = True
    opts.manage_cgroups_mode = rpc.IGNORE if options.groups is None else rpc.SOFT
    if options.groups is not None:
        opts.cgroup_yard = options.groups
    for key, fd in options.inherit.items():
        opts.inherit_fd.add(key=key, fd=fd)
    if options.root is not None:
        opts.root = options.root
        _external_mounts(opts, True)
        # Else CRIU opens their masters on a mount that only CRIU has, and they cannot be dumped
        # again.
        opts.mntns_compat_mode = options.mounted_terminals
    return opts

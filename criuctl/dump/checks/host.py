"""Check what criuctl itself needs of this host to dump this tree."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator

from ...criu import binary, features
from ...proc.namespace_sockets import namespace_socket
from ...report import Finding
from .scene import Scene

_SYS_ADMIN, _SYS_PTRACE, _NET_ADMIN = 21, 19, 12
_CAPABILITIES = {
    _SYS_PTRACE: "CAP_SYS_PTRACE (to stop processes)",
    _SYS_ADMIN: "CAP_SYS_ADMIN (to see mappings and enter namespaces)",
    _NET_ADMIN: "CAP_NET_ADMIN (to save TCP connections)",
}
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 1

SECCOMP = "seccomp"
UNFILTERED = (
    "Run criuctl without one: on the host, in a container that was started with "
    "`--security-opt seccomp=unconfined` (Kubernetes: `seccompProfile: {type: Unconfined}`), in a "
    "systemd unit without SystemCallFilter= and its like."
)


def check_host(scene: Scene) -> Iterator[Finding]:
    """Check the rights of criuctl, and what CRIU needs where it will run."""
    missing = [
        text for number, text in _CAPABILITIES.items() if not scene.own_capabilities >> number & 1
    ]
    if missing:
        yield Finding(
            "error", "capabilities", f"criuctl lacks {', '.join(missing)}", "Run criuctl as root."
        )
    restricted = [process for process in scene.living if process.seccomp]
    if scene.filtered and restricted:
        yield Finding(
            "error",
            SECCOMP,
            f"{restricted[0]} has a seccomp filter, and so has criuctl; CRIU, which inherits it, "
            "may not suspend the filters of processes then",
            UNFILTERED,
            pid=restricted[0].pid,
        )
    if (
        scene.entered("net")
        and not _loopback_is_up(scene.root.pid)
        and not _knows_the_kernel(scene)
    ):
        yield Finding(
            "error",
            "loopback-down",
            "the loopback device of the tree's net namespace is down; CRIU, which works inside "
            "it, tries TCP there first",
            f"`nsenter --target {scene.root.pid} --net ip link set lo up`.",
            pid=scene.root.pid,
        )


def _knows_the_kernel(scene: Scene) -> bool:
    """Return whether CRIU, where it will run, has a record of the kernel's features, so that it
    probes nothing.
    """
    root = f"/proc/{scene.root.pid}/root" if scene.entered("mnt") else "/"
    return features.known(binary.find(scene.config).argv, root)


def _loopback_is_up(pid: int) -> bool:
    with namespace_socket(pid, socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
    return bool(struct.unpack_from("16sH", answer)[1] & _IFF_UP)

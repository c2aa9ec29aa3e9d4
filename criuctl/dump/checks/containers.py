"""Explain why a tree in a container cannot be dumped, and what can.

A container has a root folder of its own, which its engine made and a restore on the host's root
could not give it again.  Everything else that is found in a container follows from that, and no
other remedy helps while it stands: this finding comes first (`DECISIVE`).
"""

from __future__ import annotations

from ...proc.containers import Container, container_of
from ...proc.mounts import Mount
from ...proc.procfs import read_text
from ...proc.tree import Process
from ...quoting import quoted
from ...report import Finding

DECISIVE = "own-root"  # the code that comes before all others

_NAMES = {
    "docker": "a Docker container",
    "podman": "a podman container",
    "kubernetes": "a container of Kubernetes",
    "lxc": "an LXC container",
    "nspawn": "a container of systemd-nspawn",
    "": "a container",
}


def own_root(root: Process, mount: Mount) -> Finding:
    """Return the finding about a tree whose root folder, on `mount`, is not this host's."""
    container = container_of(root.pid) or Container("", "")
    rootless = "/user.slice/" in read_text(root.pid, "cgroup")
    name = f" ({container.id})" if container.id else ""
    return Finding(
        "error",
        DECISIVE,
        f"{root} is in {_NAMES[container.engine]}{name}: it has another root folder than this host "
        f"({mount.kind}, {mount.root} of {mount.source}), which a restore by criuctl could not "
        "give it again",
        f"{_remedy(container, rootless=rootless)}, or start the program on this host itself "
        "(`criuctl run -- CMD...`), in a chroot if it needs another root folder.",
        pid=root.pid,
    )


def _remedy(container: Container, *, rootless: bool) -> str:
    """Return what the engine itself offers; `rootless`: a user has started it, not root."""
    if container.engine == "docker":
        return (
            f"Checkpoint the container: `docker checkpoint create {quoted(container.id)} NAME` "
            "(the daemon needs experimental features)"
        )
    if container.engine == "podman" and rootless:
        return (
            "Podman checkpoints containers of root alone: start it by `sudo podman run`, to "
            "checkpoint it by `sudo podman container checkpoint`"
        )
    if container.engine == "podman":
        return (
            "Checkpoint the container, with a CRIU that podman finds: `podman container checkpoint "
            f"--export FILE {quoted(container.id)}`"
        )
    if container.engine == "nspawn":
        return "systemd-nspawn cannot checkpoint: run it in a container of podman or runc as root"
    if container.engine == "kubernetes":
        return (
            "Have the kubelet checkpoint the container (POST /checkpoint/NAMESPACE/POD/CONTAINER)"
        )
    if container.engine == "lxc":
        return (
            "Checkpoint the container: `lxc-checkpoint --checkpoint-dir FOLDER --name "
            f"{quoted(container.id)}`"
        )
    return "Use what started it (`podman container checkpoint`, `runc checkpoint`)"

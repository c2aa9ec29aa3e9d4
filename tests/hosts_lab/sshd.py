"""The ssh of a lab: one key of the user, one key for each host, and which host knows which keys.

Every host's root may log in to every host, its own included, and knows the keys of all; nothing is
asked and nothing of this machine's own ``~/.ssh`` is used.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

CONFIG = """\
ListenAddress {address}
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PidFile none
GatewayPorts clientspecified
MaxStartups 100
Subsystem sftp internal-sftp
"""
CLIENT = (
    "StrictHostKeyChecking yes\nIdentityFile ~/.ssh/id_ed25519\nBatchMode yes\nLogLevel ERROR\n"
)
ARGV = ["/usr/sbin/sshd", "-D", "-e"]


def make_key(path: Path, comment: str) -> str:
    """A new key pair; the public half."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)],
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return path.with_name(path.name + ".pub").read_text()


def known_hosts(keys: dict[str, str], addresses: dict[str, str]) -> str:
    """The file in which every host finds every host."""
    return "".join(
        f"{name},{addresses[name]} {' '.join(key.split()[:2])}\n" for name, key in keys.items()
    )

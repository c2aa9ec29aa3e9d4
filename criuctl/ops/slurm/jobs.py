"""Which job asks, found out from the kernel and from Slurm alone.

What a process says about itself does not count. The kernel reports its user (SO_PEERCRED) and holds
its identity (a pidfd); Slurm's own step daemon, asked by ``scontrol listpids``, reports which
processes of this node are in which job, by whatever plugin tracks them: control groups, or descent
from the step daemon. The environment (``SLURM_JOB_ID``), names of programs, and control groups that
a user could have made are not read. The controller then reports whose job it is, and how many times
it was requeued. Of ``squeue`` only numbers are read, one field each: a job's name is any text.

A process that has left its job's descent, where no control group holds it, is in no job, and is
refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
from collections.abc import Iterable

from msgspec import Struct

from ...cgroups import membership
from ...errors import NoSuchProcess, PlatformError, PreflightRefused
from ...proc.procfs import read_status
from ...proc.tree import ProcessIdentity
from . import client

_PEERPIDFD = 77  # SO_PEERPIDFD, Linux 6.5
_FIELDS = ("JobID", "UserID", "RestartCnt", "State")
_WIDTH = 30
_CLUSTER = 24  # characters of a cluster's name in that of a session


class NotAJob(PreflightRefused):
    """The caller is no process of a job that may ask."""

    code = "not-a-job"


class Asker(Struct, frozen=True):
    """The process at the other end of a connection."""

    identity: ProcessIdentity
    uid: int
    groups: frozenset[int]


class Job(Struct, frozen=True):
    """One job on this node."""

    cluster: str
    number: int
    uid: int
    restarts: int

    @property
    def name(self) -> str:
        """Return the name of the session: bound to cluster, job and user."""
        plain = re.fullmatch(r"[A-Za-z0-9._-]+", self.cluster) and len(self.cluster) <= _CLUSTER
        digest = hashlib.blake2b(self.cluster.encode(), digest_size=8).hexdigest()
        return f"slurm-{self.cluster if plain else digest}-{self.number}-u{self.uid}"


def asker(sock: socket.socket) -> Asker:
    """Return the process that has connected; `NotAJob` for root, and for one that has ended.

    Before Linux 6.5 a PID could be another process's by now. It is compared with the user that the
    kernel noted at the connect, so it could only be another process of the same user.
    """
    pid, uid, _gid = struct.unpack(
        "iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    if uid == 0:
        raise NotAJob("jobs of root are not served", hint="Use criuctl itself.")
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _PEERPIDFD)
    except OSError:
        pidfd = -1
    try:
        identity = ProcessIdentity.of(pid)
        status = read_status(pid)
        if pidfd >= 0 and pid_behind(pidfd) != pid:
            raise NoSuchProcess(f"PID {pid} has ended")
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    if not _is_only(status, uid):
        raise NotAJob(f"PID {pid} is not user {uid}'s alone")
    return Asker(identity, uid, groups_of(status))


def pid_behind(pidfd: int) -> int:
    """Return the PID of the process behind a pidfd; -1 if it has ended, or it is no pidfd."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        found = [line.split()[1] for line in file if line.startswith("Pid:")]
    return int(found[0]) if found else -1


def groups_of(status: dict[str, str]) -> frozenset[int]:
    """Return all groups of a process."""
    return frozenset(map(int, (status["Gid"] + " " + status["Groups"]).split()))


def _is_only(status: dict[str, str], uid: int) -> bool:
    return set(status["Uid"].split()) == {str(uid)}


def check_target(pid: int, who: Asker, mine: Iterable[int]) -> ProcessIdentity:
    """Return the identity of a process that the asker has started and names by its pidfd.

    `mine`: the processes of the asker's job. `NotAJob` if it is none of them, no child of the
    asker's, or more than its user's.
    """
    identity = ProcessIdentity.of(pid)
    status = read_status(pid)
    if int(status["PPid"]) != who.identity.pid or not who.identity.alive():
        raise NotAJob(f"PID {pid} is not a child of the process that asks")
    if not _is_only(status, who.uid) or not groups_of(status) <= who.groups:
        raise NotAJob(f"PID {pid} is not user {who.uid}'s alone")
    if pid not in set(mine):
        raise NotAJob(f"PID {pid} is not in the job")
    return identity


# -- Slurm's own answers ---------------------------------------------------------------------------


def cluster_name() -> str:
    """Return the name of the cluster that this node is in; `PlatformError` without Slurm."""
    shown = client.ask("scontrol", "show", "config")
    for line in shown.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == "ClusterName":
            return value.strip()
    raise PlatformError("`scontrol show config` names no cluster")


def processes() -> dict[int, int]:
    """Return PID -> job of every process that Slurm tracks on this node."""
    return parse_processes(client.ask("scontrol", "listpids", check=False))


def parse_processes(text: str) -> dict[int, int]:
    """Parse ``scontrol listpids``; lines that are not of that form are left out."""
    found = {}
    for words in map(str.split, text.splitlines()):
        if len(words) >= 3 and words[0].isdigit() and words[1].isdigit():
            found[int(words[0])] = int(words[1])
    return found


def job_of(who: Asker, cluster: str) -> Job:
    """Return the asker's job; `NotAJob` if it is in none, or in another user's."""
    tracked = processes()
    number = tracked.get(who.identity.pid)
    if number is None or not who.identity.alive():
        raise NotAJob(
            f"PID {who.identity.pid} is in no job of Slurm on this node",
            hint="Start it in a batch script: `sbatch --requeue --signal=B:USR1@120 ...`.",
        )
    fields = ",".join(f"{field}:{_WIDTH}" for field in _FIELDS)
    shown = client.ask("squeue", "--noheader", "--array", "-j", str(number), "-O", fields)
    owner, restarts = parse_job(shown, number)
    if owner != who.uid:
        raise NotAJob(f"job {number} is not user {who.uid}'s")
    return Job(cluster, number, owner, restarts)


def parse_job(text: str, number: int) -> tuple[int, int]:
    """Return owner and restarts of a job by ``squeue``; its array may be listed as well."""
    found = set()
    for words in map(str.split, text.splitlines()):
        if len(words) == len(_FIELDS) and words[0] == str(number) and words[3] != "PENDING":
            found.add((int(words[1]), int(words[2])))
    if len(found) != 1:
        raise NotAJob(f"Slurm's controller does not know job {number} as one that runs")
    return found.pop()


def groups_of_job(who: Asker) -> dict[str, str]:
    """Return the control groups that the asker is in, in which a restored tree is made."""
    return membership.of_process(who.identity.pid)

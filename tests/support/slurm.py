"""A Slurm cluster of two nodes on this machine: munge, a controller, nodes that are namespaces.

Everything runs in an `Identity`, because criuctl dumps processes of ordinary users here.  Each node
has mounts, processes, a network and a host name of its own, a slurmd, and ``criuctl slurm serve``
with folders of its own; the nodes share the store and the users' folders.  CRIU restores there with
`forced_buffers.c`.

What makes it quick: ``cred_expire`` is how long a requeued job waits before it may start again (two
minutes by default); the scheduler looks every second, and a job that must end is killed after
`KILL_WAIT` seconds.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from criuctl import config
from criuctl.criu import binary

from . import leaks
from .identity import Identity
from .keeper import wait_until

PROJECT = Path(__file__).parent.parent.parent
USERS = {"ada": 2001, "mal": 2002}
NAMES = ("n1", "n2")
KILL_WAIT = 20
GRACE_TIME = 30
PATIENCE = 60.0  # seconds for what takes one or two
_ADDRESS = "10.91.7"
_CONFIG = """\
ClusterName=lab
SlurmctldHost=ctl({address}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge.sock,cred_expire=6
CredType=cred/munge
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool-%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd-%n.log
SlurmctldPort=6817
SlurmdPort=6818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmctldParameters=preempt_send_user_signal
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
CompleteWait=0
SlurmdTimeout={node_timeout}
MessageTimeout=10
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeAddr={address}.11 CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeAddr={address}.12 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF State=UP
"""


class Node:
    """One node: its namespaces, and what runs there for as long as it is up."""

    def __init__(self, cluster: Cluster, name: str, number: int) -> None:
        self.name, self._cluster = name, cluster
        self.address = f"{_ADDRESS}.{number + 10}"
        self.run_dir = cluster.folder / name
        script = (
            f"hostname {name}; mount -t tmpfs none /run; "
            "ip link set lo up; echo up; "
            "while :; do sleep 3600 & wait $!; done"
        )
        self._init = subprocess.Popen(
            [
                *cluster.identity.prefix,
                *("unshare", "--mount", "--uts", "--ipc", "--pid", "--net", "--fork"),
                *("--kill-child", "--mount-proc", "sh", "-c", script),
            ],
            stdout=subprocess.PIPE,
            env=cluster.environment(),
            start_new_session=True,
        )
        assert self._init.stdout is not None and self._init.stdout.readline() == b"up\n"
        self.init = self._find_init()
        cluster.sh(
            f"ip link add {name} type veth peer name eth0 netns {cluster.inner(self.init)}; "
            f"ip link set {name} master lab up"
        )
        self.sh(f"ip link set eth0 up; ip addr add {self.address}/24 dev eth0")

    def _find_init(self) -> int:
        # unshare's child, by what it has become: the shell, which is PID 1 in a namespace below
        pending = [self._init.pid]
        while pending:
            pid = pending.pop()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in map(int, children):
                status = Path(f"/proc/{child}/status").read_text()
                spaces = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                if spaces.split()[-1] == "1" and Path(f"/proc/{child}/comm").read_text() == "sh\n":
                    return child
                pending.append(child)
        raise AssertionError(f"node {self.name} has no PID 1")

    @property
    def prefix(self) -> list[str]:
        """The program that runs a command as root on the node."""
        kinds = ("user", "mount", "pid", "net", "ipc", "uts")
        return ["nsenter", f"--target={self.init}", *(f"--{kind}" for kind in kinds), "--"]

    def environment(self) -> dict[str, str]:
        """The environment of criuctl's service there, which no user's command has."""
        cluster = self._cluster
        return cluster.environment() | {
            "CRIUCTL_STORE": str(cluster.store),
            "CRIUCTL_KEY_DIR": str(cluster.folder / "keys"),
            "CRIUCTL_HOST_ID": self.name,
            "CRIUCTL_CRIU": str(cluster.criu),
            "CRIUCTL_STATE_DIR": str(self.run_dir / "state"),
            "CRIUCTL_CACHE_DIR": str(self.run_dir / "cache"),
            "CRIUCTL_HOOK_DIRS": str(self.run_dir / "hooks"),
        }

    def sh(self, script: str, *, check: bool = True) -> str:
        """Run a shell script as root there, with the environment of the service."""
        done = subprocess.run(
            [*self.prefix, "sh", "-euc", script],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
        )
        assert done.returncode == 0 or not check, (
            f"{self.name}: {script}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def criuctl(self, *words: str, check: bool = True) -> str:
        """Run criuctl as root there, with the settings of the service."""
        return self.sh(shlex.join([sys.executable, "-m", "criuctl", *words]), check=check)

    def start_slurmd(self) -> None:
        """Start slurmd, which registers with the controller."""
        (self._cluster.folder / f"spool-{self.name}").mkdir(mode=0o755, exist_ok=True)
        self.sh(f"slurmd -N {self.name}")

    def start_service(self, *options: str) -> None:
        """Start criuctl's service, and wait until it listens."""
        log = self.run_dir / "service.log"
        with log.open("ab") as out:
            self.service = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "criuctl", "slurm", "serve", *options],
                env=self.environment(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        socket = Path(f"/proc/{self.init}/root/run/criuctl-slurm/socket")
        wait_until(
            socket.exists, PATIENCE, f"the service of {self.name} listens ({log.read_text()})"
        )

    def stop_service(self) -> None:
        """Have the service end; the processes that serve running jobs stay."""
        self.sh("kill $(pgrep -o -f 'slurm serve')")
        self.service.wait(PATIENCE)

    def cut(self) -> None:
        """Unplug the node's network; what runs there goes on."""
        self._cluster.sh(f"ip link set {self.name} down")

    def plug(self) -> None:
        """Plug it in again."""
        self._cluster.sh(f"ip link set {self.name} up")

    def close(self) -> None:
        """End everything there."""
        self._init.kill()
        self._init.wait(PATIENCE)


class Cluster:
    """The cluster; `close` it."""

    def __init__(self, folder: Path, token: str, *, node_timeout: int = 300) -> None:
        self.folder, self.token = folder, token
        self.store = folder / "store"
        folder.chmod(0o755)
        self.identity = Identity(token)
        self.nodes: dict[str, Node] = {}
        try:
            self._start(node_timeout)
        except BaseException:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """The environment of everything here."""
        return {
            "LANG": "C.UTF-8",
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "CZOO_TOKEN": self.token,
            "PYTHONPATH": str(PROJECT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }

    def inner(self, pid: int) -> int:
        """What the namespaces of all nodes call a process."""
        status = Path(f"/proc/{pid}/status").read_text()
        spaces = next(line for line in status.splitlines() if line.startswith("NSpid:"))
        return int(spaces.split()[2])

    def sh(self, script: str, *, uid: int = 0, check: bool = True) -> str:
        """Run a shell script next to the controller."""
        prefix = self.identity.as_user(uid) if uid else self.identity.prefix
        done = subprocess.run(
            [*prefix, "sh", "-euc", script],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
            cwd="/",
        )
        assert done.returncode == 0 or not check, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, node_timeout: int) -> None:
        folder = self.folder
        (folder / "state").mkdir(mode=0o700)
        config = _CONFIG.format(
            run=folder,
            address=_ADDRESS,
            kill_wait=KILL_WAIT,
            grace=GRACE_TIME,
            node_timeout=node_timeout,
        )
        (folder / "slurm.conf").write_text(config)
        key = folder / "munge.key"
        with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(1024))
        self._users()
        self._criu()
        self.sh(
            "ip link add lab type bridge; ip link set lab up; "
            f"ip addr add {_ADDRESS}.1/24 dev lab; hostname ctl"
        )
        self.sh(
            f"munged --force --key-file {key} --socket {folder}/munge.sock "
            f"--pid-file {folder}/munged.pid --log-file {folder}/munged.log "
            f"--seed-file {folder}/munge.seed"
        )
        for number, name in enumerate(NAMES, 1):
            (folder / name).mkdir(mode=0o700)
            self.nodes[name] = Node(self, name, number)
        self.sh("slurmctld")
        for node in self.nodes.values():
            node.start_slurmd()
        wait_until(self._all_idle, PATIENCE, "both nodes are idle")

    def _users(self) -> None:
        """Give users to the cluster, not to this machine."""
        for name, line in (("passwd", "{0}:x:{1}:{1}::{2}:/bin/sh\n"), ("group", "{0}:x:{1}:\n")):
            text = Path(f"/etc/{name}").read_text()
            for user, uid in USERS.items():
                text += line.format(user, uid, self.home(user))
            (self.folder / name).write_text(text)
            self.sh(f"mount --bind {self.folder}/{name} /etc/{name}")
        for user, uid in USERS.items():
            self.home(user).mkdir(mode=0o755)
            os.chown(self.home(user), uid, uid)

    def _criu(self) -> None:
        """Make a CRIU that can restore in a user namespace."""
        library = self.folder / "forced_buffers.so"
        source = Path(__file__).with_name("forced_buffers.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
        loader, *rest = binary.find(config.load()).argv
        words = [loader, "--preload", str(library), *rest]
        if not rest:  # no loader of a prefix's own
            words = ["env", f"LD_PRELOAD={library}", loader]
        self.criu = self.folder / "criu"
        self.criu.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.criu.chmod(0o755)

    def home(self, user: str) -> Path:
        """The user's folder, which the nodes share."""
        return self.folder / f"home-{user}"

    def _all_idle(self) -> bool:
        states = self.sh("sinfo -h -N -p low -o %T").split()
        return states == ["idle"] * len(NAMES)

    # -- jobs --------------------------------------------------------------------------------------

    def submit(self, user: str, script: str, *options: str) -> int:
        """Submit a batch script as `user`, with output in ``out-JOB`` of the user's folder."""
        home = self.home(user)
        path = home / "job.sh"
        path.write_text("#!/bin/sh\n" + script)
        words = [
            *("sbatch", "--parsable", "--requeue", "--open-mode=append"),
            *("-D", str(home), "-o", "out-%A_%a" if _is_array(options) else "out-%j"),
            *options,
            str(path),
        ]
        return int(self.sh(shlex.join(words), uid=USERS[user]).strip())

    def state(self, job: int | str) -> str:
        """The job's state, as squeue and then scontrol tell it."""
        shown = self.sh(f"scontrol show job {job} -o", check=False)
        found = [word for word in shown.split() if word.startswith("JobState=")]
        return found[0].partition("=")[2] if found else ""

    def story(self, job: int | str) -> str:
        """What the controller and the nodes' services say, for a test that fails."""
        logs = [self.folder / "slurmctld.log", *self.folder.glob("*/service.log")]
        texts = [f"{path.name}: {path.read_text()[-3000:]}" for path in logs]
        return "\n".join([self.sh(f"scontrol show job {job} -o", check=False), *texts])

    def field(self, job: int | str, name: str) -> str:
        """One field of ``scontrol show job``."""
        shown = self.sh(f"scontrol show job {job} -o")
        return next(w.partition("=")[2] for w in shown.split() if w.startswith(f"{name}="))

    def output(self, user: str, job: int | str) -> str:
        """What the job has printed so far."""
        path = self.home(user) / f"out-{job}"
        return path.read_text() if path.exists() else ""

    def wait_state(self, job: int | str, *states: str) -> None:
        """Wait until the job is in one of these states."""
        try:
            wait_until(lambda: self.state(job) in states, PATIENCE * 2, f"job {job} is {states}")
        except TimeoutError as error:
            raise AssertionError(f"{error}: {self.story(job)}") from error

    def wait_output(self, user: str, job: int | str, text: str, *, count: int = 1) -> None:
        """Wait until the job has printed this text, `count` times."""
        wait_until(
            lambda: self.output(user, job).count(text) >= count,
            PATIENCE * 2,
            f"job {job} prints {text!r}: {self.output(user, job)}",
        )

    def close(self) -> None:
        """End everything."""
        for node in self.nodes.values():
            node.close()
        self.identity.close()


def _is_array(options: Sequence[str]) -> bool:
    return any(option.startswith("--array") for option in options)


RUN = f"exec {sys.executable} -m criuctl slurm run"
SERVICE = ("--fence-every", "1", "--min-interval", "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with criuctl's service on each node, for all tests of a module."""
    token = f"czoo{uuid.uuid4().hex[:10]}"
    folder = Path("/tmp") / token
    folder.mkdir(mode=0o755)
    try:
        made = Cluster(folder, token)
        try:
            for node in made.nodes.values():
                node.start_service(*SERVICE)
            yield made
        finally:
            made.close()
        found = leaks.processes_of(token)  # all else was in namespaces, which are gone
    finally:
        leaks.end_processes(token)
        shutil.rmtree(folder)
    assert not found, f"left behind: {found}"

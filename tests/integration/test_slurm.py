"""Jobs of a real Slurm cluster that go on on another node: `criuctl slurm run` and the service."""

from __future__ import annotations

import re
import shlex
import sys
import time

import pytest
from support.keeper import wait_until
from support.slurm import GRACE_TIME, PATIENCE, RUN, SERVICE, Cluster

# Counts in its memory until the file `stop` has the code to end with.
COUNTER = """
import os, sys, time
name = sys.argv[1]
n = 0
while not os.path.exists(name):
    n += 1
    print("count", n, os.uname().nodename, os.getpid(), flush=True)
    print("error", n, file=sys.stderr, flush=True)
    time.sleep(0.05)
sys.exit(int(open(name).read()))
"""


class Counter:
    """A job that counts."""

    def __init__(self, cluster: Cluster, name: str, *options: str, run: str = "") -> None:
        self.cluster, self.name = cluster, name
        self.home = cluster.home("ada")
        (self.home / "counter.py").write_text(COUNTER)
        words = shlex.join(["/usr/bin/python3", "-S", "counter.py", f"stop-{name}"])
        options = options or ("--signal=B:USR1@60",)
        self.job = cluster.submit("ada", f"{RUN} {run} -- {words}", *options)

    @property
    def output(self) -> str:
        """All that the job has printed."""
        return self.cluster.output("ada", self.job)

    def counts(self) -> list[tuple[int, str]]:
        """The numbers, and on which node each was counted."""
        return [
            (int(n), node)
            for n, node in re.findall(r"^count (\d+) (\S+)", self.output, re.MULTILINE)
        ]

    def wait_on(self, node: str) -> None:
        """Wait until it counts on this node."""
        wait_until(
            lambda: any(n[1] == node for n in self.counts()[-5:]),
            PATIENCE * 2,
            f"job {self.job} counts on {node}: {self.output}",
        )

    def stop(self, code: int) -> None:
        """Have the program end with this code."""
        (self.home / f"stop-{self.name}").write_text(str(code))

    def end(self, code: int) -> None:
        """Have it end, and check that Slurm got the exit code."""
        self.stop(code)
        self.cluster.wait_state(self.job, "COMPLETED" if code == 0 else "FAILED")
        assert self.cluster.field(self.job, "ExitCode") == f"{code}:0", self.output


def use(cluster: Cluster, node: str) -> None:
    """Have new jobs placed on this node."""
    for name in cluster.nodes:
        state = "resume" if name == node else "drain reason=test"
        cluster.sh(f"scontrol update nodename={name} state={state}", check=False)


def checkpoints(cluster: Cluster, job: int) -> str:
    """The checkpoints of a job in the store, one a line."""
    return cluster.nodes["n1"].criuctl("list", f"slurm-lab-{job}-u2001", "-q", check=False)


@pytest.mark.parametrize("code", [0, 7])
def test_it_goes_on_on_another_node(cluster: Cluster, code: int) -> None:
    """A warned job is stored, queued again, and goes on elsewhere where it was."""
    use(cluster, "n1")
    counter = Counter(cluster, f"move-{code}")
    counter.wait_on("n1")
    use(cluster, "n2")
    cluster.sh(f"scancel --batch --signal=USR1 {counter.job}")
    counter.wait_on("n2")
    assert cluster.field(counter.job, "Restarts") == "1"
    counter.end(code)
    numbers = [n for n, _ in counter.counts()]
    assert numbers == list(range(1, numbers[-1] + 1)), counter.output  # none lost, none twice
    assert re.findall(r"^error (\d+)", counter.output, re.MULTILINE) == [str(n) for n in numbers]
    pids = set(re.findall(r"^count \d+ n\d (\d+)", counter.output, re.MULTILINE))
    assert len(pids) == 1
    assert bool(checkpoints(cluster, counter.job)) == bool(code)


def test_a_requeue_by_the_administrator(cluster: Cluster) -> None:
    """`scontrol requeue` sends SIGTERM to every process of the job: none ends before it is
    stored.
    """
    use(cluster, "n1")
    counter = Counter(cluster, "requeue", "--time=10")
    counter.wait_on("n1")
    cluster.sh(f"scontrol requeue {counter.job}")
    cluster.wait_output("ada", counter.job, "restored checkpoint")
    counter.end(0)
    numbers = [n for n, _ in counter.counts()]
    assert numbers == list(range(1, numbers[-1] + 1)), counter.output


def test_a_preempted_job(cluster: Cluster) -> None:
    """A job of higher priority gets the node, and then the first one goes on."""
    use(cluster, "n1")
    counter = Counter(cluster, "preempted")
    counter.wait_on("n1")
    other = cluster.submit("mal", "echo high", "-p", "high", "--exclusive")
    cluster.wait_output("mal", other, "high")
    stored = len(counter.counts())
    cluster.wait_output("ada", counter.job, "restored checkpoint")
    counter.end(0)
    numbers = [n for n, _ in counter.counts()]
    assert numbers == list(range(1, numbers[-1] + 1)), counter.output
    assert numbers[-1] > stored


TRAPS = """
for name in USR1 TERM; do trap "echo $name \\$(date +%s)" $name; done
echo ready
while :; do sleep 0.2 & wait $!; done
"""


@pytest.mark.parametrize(("options", "warning"), [(["--signal=B:USR1@60"], "USR1"), ([], "TERM")])
def test_when_a_preempted_job_is_warned(options: list[str], warning: str, cluster: Cluster) -> None:
    """Its script gets its own signal when GraceTime begins; SIGTERM only when it is over."""
    use(cluster, "n1")
    job = cluster.submit("ada", TRAPS, "--time=10", *options)
    cluster.wait_output("ada", job, "ready")
    other = cluster.submit("mal", "echo high", "-p", "high", "--exclusive")
    began = time.monotonic()
    wait_until(lambda: re.search("USR1|TERM", cluster.output("ada", job)), PATIENCE, "a warning")
    took, first = time.monotonic() - began, re.findall("USR1|TERM", cluster.output("ada", job))[0]
    cluster.sh(f"scancel {other}; scancel --full --signal=KILL {job}; scancel {job}")
    assert first == warning
    assert took < GRACE_TIME / 2 if options else took > GRACE_TIME - 5
    cluster.wait_state(job, "CANCELLED")


def test_the_time_limit(cluster: Cluster) -> None:
    """Without a signal of Slurm's, the program is stored before the job's time is over."""
    use(cluster, "n1")
    counter = Counter(cluster, "limit", "--time=1", run="--checkpoint-before 57")
    cluster.wait_output("ada", counter.job, "restored checkpoint")
    counter.end(0)
    numbers = [n for n, _ in counter.counts()]
    assert numbers == list(range(1, numbers[-1] + 1)), counter.output


def test_tasks_of_an_array(cluster: Cluster) -> None:
    """Each task is a job of its own, with checkpoints of its own."""
    use(cluster, "n1")
    words = "/usr/bin/python3 -S counter.py stop-array"
    (cluster.home("ada") / "counter.py").write_text(COUNTER)
    script = f"sleep 0.$SLURM_ARRAY_TASK_ID; {RUN} -- {words}"
    array = cluster.submit("ada", script, "--array=1-2", "--signal=B:USR1@60")
    outputs = [f"{array}_1", f"{array}_2"]
    for name in outputs:
        cluster.wait_output("ada", name, "count 5 ")
    use(cluster, "n2")
    for name in outputs:
        cluster.sh(f"scancel --batch --signal=USR1 {name}")
    for name in outputs:
        cluster.wait_output("ada", name, " n2 ")
    (cluster.home("ada") / "stop-array").write_text("0")
    for name in outputs:
        cluster.wait_state(name, "COMPLETED")
        text = cluster.output("ada", name)
        numbers = [int(n) for n in re.findall(r"^count (\d+)", text, re.MULTILINE)]
        assert numbers == list(range(1, numbers[-1] + 1)), text


def test_a_cancelled_job(cluster: Cluster) -> None:
    """It ends, started or restored, and is not brought back."""
    use(cluster, "n1")
    counter = Counter(cluster, "cancelled")
    counter.wait_on("n1")
    cluster.sh(f"scancel --batch --signal=USR1 {counter.job}")
    cluster.wait_output("ada", counter.job, "restored checkpoint")
    pid = re.findall(r"^count \d+ n1 (\d+)", counter.output, re.MULTILINE)[0]
    cluster.sh(f"scancel {counter.job}")
    cluster.wait_state(counter.job, "CANCELLED")
    assert cluster.field(counter.job, "Restarts") == "1"
    gone = f"test -d /proc/{pid} && echo there || true"
    wait_until(lambda: not cluster.nodes["n1"].sh(gone), PATIENCE, "its program has ended")
    started = Counter(cluster, "cancelled-early")
    started.wait_on("n1")
    cluster.sh(f"scancel {started.job}")
    cluster.wait_state(started.job, "CANCELLED")
    assert cluster.field(started.job, "Restarts") == "0"
    assert "checkpoint" not in started.output


def test_a_service_that_can_store_nothing(cluster: Cluster) -> None:
    """It says so when it starts, and one that can does not."""
    node = cluster.nodes["n1"]
    serve = "-m criuctl slurm serve --socket /run/criuctl-poor/socket"
    less = "setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource timeout 15"
    out = node.sh(f"{less} {sys.executable} {serve} 2>&1", check=False)
    assert "no job can be stored: CAP_SYS_RESOURCE is missing" in out
    assert "CAP_SYS_RESOURCE" not in (node.run_dir / "service.log").read_text()


def test_the_service_is_restarted(cluster: Cluster) -> None:
    """A job that runs goes on being served: the process that serves it stays."""
    use(cluster, "n1")
    counter = Counter(cluster, "restarted")
    counter.wait_on("n1")
    cluster.nodes["n1"].stop_service()
    cluster.nodes["n1"].start_service(*SERVICE)
    cluster.sh(f"scancel --batch --signal=USR1 {counter.job}")
    cluster.wait_output("ada", counter.job, "restored checkpoint")
    counter.end(0)


def test_the_service_is_killed(cluster: Cluster) -> None:
    """The program runs on to its end, and the job's output says that it is not stored."""
    use(cluster, "n1")
    counter = Counter(cluster, "killed")
    counter.wait_on("n1")
    node = cluster.nodes["n1"]
    node.sh("pkill -KILL -P $(pgrep -o -f 'slurm serve') -f 'slurm serve'")
    cluster.wait_output("ada", counter.job, "is not stored")
    counter.end(5)


def test_a_node_that_was_thought_dead_comes_back(cluster: Cluster) -> None:
    """The newest checkpoint goes on elsewhere, and the copy of the node that was cut off ends."""
    use(cluster, "n1")
    counter = Counter(cluster, "dead", run="--every 1s")
    cluster.wait_output("ada", counter.job, "criuctl: checkpoint")
    node = cluster.nodes["n1"]
    pid = re.findall(r"^count \d+ n1 (\d+)", counter.output, re.MULTILINE)[0]
    node.cut()
    try:
        use(cluster, "n2")
        cluster.sh("scontrol update nodename=n1 state=down reason=dead")
        counter.wait_on("n2")
        running = f"test -d /proc/{pid} && echo there || true"
        wait_until(lambda: not node.sh(running), PATIENCE, f"the copy on n1 ends: {counter.output}")
    finally:
        node.plug()
    wait_until(lambda: counter.counts()[-1][1] == "n2", PATIENCE, "only n2 counts")
    begins = next(n for n, where in counter.counts() if where == "n2")
    assert 1 < begins <= max(n for n, where in counter.counts() if where == "n1") + 1
    cluster.wait_output("ada", counter.job, "was taken over by host n2")
    counter.end(0)

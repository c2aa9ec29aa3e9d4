"""Jobs of a real Slurm cluster that go on on another node: `criuctl slurm run` and the service."""

from __future__ import annotations

import re
import shlex

import pytest
from support.keeper import wait_until
from support.slurm import PATIENCE, RUN, Cluster

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

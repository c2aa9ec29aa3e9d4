"""Compare what survives a requeue: criuctl, and DMTCP with the batch script that its users write.

``python -m bench.slurm_jobs DMTCP_PREFIX [PROGRAM...]`` starts the cluster of `support.slurm`; each
program runs as a job, is warned, is queued again, and is placed on the other node.  A line for
each: whether it went on there where it was, how long it took from the warning to the requeue, and
from its new start to its next output.  The times compare two programs on one machine; they are not
those of a cluster.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec import Struct
from support.keeper import wait_until
from support.slurm import RUN, SERVICE, Cluster

_PATIENCE = 40.0  # seconds

_PYTHON = """
import sys, time
ballast = bytearray(sys.argv[1:] and int(sys.argv[1]) << 20)
for i in range(0, len(ballast), 4096):
    ballast[i] = i >> 12 & 255
for n in range(1, 10**9):
    print("count", n, flush=True)
    time.sleep(0.05)
"""
# Not a Pool: its semaphores are deleted files that are mapped, which CRIU reads with a right of the
# first user namespace only, and the cluster is in another one.
_PROCESSES = """
import multiprocessing, time
def double(end):
    while True:
        end.send(2 * end.recv())
if __name__ == "__main__":
    ends = []
    for _ in range(3):
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=double, args=(theirs,), daemon=True).start()
        ends.append(ours)
    for n in range(1, 10**9):
        for end in ends:
            end.send(n)
        assert [end.recv() for end in ends] == [2 * n] * 3
        print("count", n, flush=True)
        time.sleep(0.05)
"""
_SHELL = "n=0; while :; do n=$((n+1)); echo count $n | cat; sleep 0.05; done"
_C = """
#include <stdio.h>
#include <unistd.h>
int main(void) {
    for (int n = 1;; n++) { printf("count %d\\n", n); fflush(stdout); usleep(50000); }
}
"""
_NODE = "let n = 0; setInterval(() => console.log('count', ++n), 50)"
_SERVER = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
def serve():
    connection, _ = server.accept()
    while data := connection.recv(1):
        connection.sendall(data)
threading.Thread(target=serve, daemon=True).start()
client = socket.create_connection(server.getsockname())
for n in range(1, 10**9):
    client.sendall(b"x")
    assert client.recv(1) == b"x"
    print("count", n, flush=True)
    time.sleep(0.05)
"""
_DMTCP = """\
export PATH={prefix}/bin:$PATH DMTCP_COORD_HOST=127.0.0.1
mkdir -p ckpt-{name}; cd ckpt-{name}; rm -f port
warned() {{
    dmtcp_command --coord-port $(cat port) --bcheckpoint >&2
    dmtcp_command --coord-port $(cat port) --quit >&2
    scontrol requeue $SLURM_JOB_ID
}}
trap warned USR1
set -- *.dmtcp
if [ -e "$1" ]; then
    dmtcp_restart --new-coordinator --coord-port 0 --port-file port "$@" &
else
    dmtcp_launch --new-coordinator --coord-port 0 --port-file port -- {command} &
fi
wait; wait
"""


class Outcome(Struct, frozen=True):
    """What became of one program under one way; times in seconds."""

    program: str
    way: str
    goes_on: bool = False
    stored_s: float = 0.0
    resumed_s: float = 0.0
    lost: int = 0  # counts that were done again, or are missing
    why: str = ""

    def line(self) -> str:
        """Return it as one line."""
        if not self.goes_on:
            return f"{self.program:22} {self.way:8} does not go on: {self.why}"
        return (
            f"{self.program:22} {self.way:8} stored {self.stored_s:5.1f} s, goes on after "
            f"{self.resumed_s:5.1f} s, {self.lost} of the work lost"
        )


def programs(folder: Path) -> dict[str, list[str]]:
    """Write the programs, and return their commands by name."""
    for name, text in (("count.py", _PYTHON), ("processes.py", _PROCESSES), ("server.py", _SERVER)):
        (folder / name).write_text(text)
    (folder / "count.c").write_text(_C)
    subprocess.run(["gcc", "-static", "-o", folder / "static", folder / "count.c"], check=True)
    python = ["/usr/bin/python3", "-S"]
    return {
        "python": [*python, str(folder / "count.py")],
        "python, 200 MiB": [*python, str(folder / "count.py"), "200"],
        "python, processes": [*python, str(folder / "processes.py")],
        "python, TCP": [*python, str(folder / "server.py")],
        "sh, pipes": ["/bin/sh", "-c", _SHELL],
        "static C": [str(folder / "static")],
        "node": ["node", "-e", _NODE],
    }


def script(way: str, prefix: str, name: str, command: list[str]) -> str:
    """Return the batch script of a program."""
    words = shlex.join(command)
    if way == "criuctl":
        return f"{RUN} -- {words}"
    return _DMTCP.format(prefix=prefix, name=name, command=words)


def _counts(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"^count (\d+)$", text, re.MULTILINE)]


def _use(cluster: Cluster, node: str) -> None:
    for name in cluster.nodes:
        state = "resume" if name == node else "drain reason=bench"
        cluster.sh(f"scontrol update nodename={name} state={state}", check=False)


def measure(cluster: Cluster, program: str, way: str, text: str) -> Outcome:
    """Run one program, have it queued again and placed on the other node."""
    _use(cluster, "n1")
    job = cluster.submit("ada", text, "--signal=B:USR1@60")

    def output() -> str:
        return cluster.output("ada", job)

    try:
        wait_until(lambda: len(_counts(output())) > 20, _PATIENCE, "it does not start")
        _use(cluster, "n2")
        warned = time.monotonic()
        cluster.sh(f"scancel --batch --signal=USR1 {job}")
        wait_until(lambda: cluster.state(job) == "PENDING", _PATIENCE, "it is not queued again")
        stored = time.monotonic() - warned
        before = _counts(output())
        wait_until(lambda: cluster.state(job) != "PENDING", _PATIENCE, "it does not start again")
        began = time.monotonic()
        wait_until(
            lambda: len(_counts(output())) > len(before) or cluster.state(job) != "RUNNING",
            _PATIENCE,
            "it prints nothing more",
        )
        resumed = time.monotonic() - began
        time.sleep(2)
        numbers = _counts(output())
        if cluster.state(job) != "RUNNING" or len(numbers) < len(before) + 5:
            raise TimeoutError("it ends at its new start")
        lost = abs(before[-1] + 1 - numbers[len(before)])
        if numbers[len(before)] == 1:
            raise TimeoutError("it begins from nothing")
        return Outcome(program, way, True, stored, resumed, lost)
    except TimeoutError as error:
        said = [line for line in output().splitlines() if "rror" in line or "riuctl" in line]
        why = str(error).partition("not: ")[2] or str(error)
        return Outcome(program, way, why=f"{why} ({(said or ['no message'])[-1][:90]})")
    finally:
        cluster.sh(f"scancel --full --signal=KILL {job}; scancel {job}", check=False)
        wait_until(lambda: cluster.state(job) not in ("RUNNING", "PENDING"), 60, "it ends")


def main() -> None:
    """Print a line for each program and way."""
    prefix, *wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="slurm-jobs-", dir="/tmp") as path:
        folder = Path(path)
        cluster = Cluster(folder, folder.name)
        try:
            for node in cluster.nodes.values():
                node.start_service(*SERVICE)
            for number, (name, command) in enumerate(programs(folder).items()):
                if wanted and name not in wanted:
                    continue
                for way in ("criuctl", "dmtcp"):
                    text = script(way, prefix, str(number), command)
                    print(measure(cluster, name, way, text).line(), flush=True)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()

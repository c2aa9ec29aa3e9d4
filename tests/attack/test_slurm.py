"""The service of Slurm's jobs: what a hostile user of the cluster gains of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from support.keeper import wait_until
from support.slurm import PATIENCE, RUN, USERS, Cluster

pytestmark = pytest.mark.integration

# Evaluates the Python of `ask-N` in the job, and leaves what comes of it in `answer-N`.
HOSTILE = """
import array, json, os, signal, socket, sys, time
def connect():
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60)
    sock.connect("/run/criuctl-slurm/socket")
    return sock
def say(sock, body, fds=()):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        socket.send_fds(sock, [data], list(fds))
        while True:
            got = sock.recv(65536)
            if not got:
                return {"closed": True}
            answer = json.loads(got)
            if "event" not in answer:
                return answer
    except OSError as error:
        return {"errno": error.errno}
def ask(body, fds=(), greet=True):
    with connect() as sock:
        if greet:
            answer = say(sock, {"op": "hello"})
            if not answer.get("ok"):
                return answer
        return say(sock, body, fds)
def pipes():
    return [os.pipe()[1], os.pipe()[1]]
def child():
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    return pid
def start(pid):
    return ask({"op": "start"}, [os.pidfd_open(pid), *pipes()])
def stale():
    pid = child()
    fd = os.pidfd_open(pid)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return ask({"op": "start"}, [fd, *pipes()])
held = []
def begun(pid):
    sock = connect()
    say(sock, {"op": "hello"})
    return sock, say(sock, {"op": "start"}, [os.pidfd_open(pid), *pipes()])
n = 0
while True:
    n += 1
    while not os.path.exists(f"ask-{n}"):
        time.sleep(0.02)
    try:
        answer = eval(open(f"ask-{n}").read())
    except BaseException as error:
        answer = repr(error)
    with open("answer", "w") as file:
        json.dump(answer, file)
    os.rename("answer", f"answer-{n}")
"""


class Attacker:
    """A job of the hostile user, in which expressions are evaluated."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.home, self._count = cluster, cluster.home("mal"), 0
        for old in self.home.glob("a*-*"):
            old.unlink()
        (self.home / "hostile.py").write_text(HOSTILE)
        self.job = cluster.submit("mal", "exec /usr/bin/python3 -S hostile.py", "-w", "n1")
        cluster.wait_state(self.job, "RUNNING")

    def evaluate(self, expression: str) -> Any:
        """What comes of it."""
        self._count += 1
        draft = self.home / "draft"
        draft.write_text(expression)
        draft.rename(self.home / f"ask-{self._count}")
        answer = self.home / f"answer-{self._count}"
        wait_until(answer.exists, PATIENCE, f"an answer to {expression}")
        return json.loads(answer.read_text())


@pytest.fixture
def attacker(cluster: Cluster) -> Iterator[Attacker]:
    """A hostile job on the node n1."""
    made = Attacker(cluster)
    yield made
    cluster.sh(f"scancel --full --signal=KILL {made.job}; scancel {made.job}", check=False)


@pytest.fixture(scope="module")
def victim(cluster: Cluster) -> tuple[int, int]:
    """A job of another user on n1, which has a checkpoint, and the PID of its program there."""
    (cluster.home("ada") / "victim.py").write_text(
        "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(100000)\n"
    )
    script = f"{RUN} --every 1s -- /usr/bin/python3 -S victim.py"
    job = cluster.submit("ada", script, "-w", "n1")
    cluster.wait_output("ada", job, "criuctl: checkpoint")
    words = cluster.output("ada", job).split()
    return job, int(words[words.index("pid") + 1])


def refused(answer: Any, code: str = "not-a-job") -> bool:
    """Whether the service has refused it, for this reason."""
    return isinstance(answer, dict) and answer.get("error", {}).get("code") == code


def test_another_user_s_process(
    cluster: Cluster, attacker: Attacker, victim: tuple[int, int]
) -> None:
    """It is neither dumped nor ended: a pidfd, which anyone can have, gives no right to it."""
    _job, pid = victim
    assert refused(attacker.evaluate(f"start({pid})"))
    assert refused(attacker.evaluate("start(1)"))
    service = cluster.nodes["n1"].sh("pgrep -o -f 'slurm serve'").strip()
    assert refused(attacker.evaluate(f"start({service})"))
    assert cluster.nodes["n1"].sh(f"cat /proc/{pid}/comm") == "python3\n"


def test_a_process_that_the_caller_has_not_started(attacker: Attacker) -> None:
    """The caller itself, and a process that has left the job, are refused."""
    assert refused(attacker.evaluate("start(os.getpid())"))
    assert refused(attacker.evaluate("start(os.getppid())"))


def test_another_user_s_checkpoint(
    cluster: Cluster, attacker: Attacker, victim: tuple[int, int]
) -> None:
    """No request and no variable names a job or a checkpoint."""
    job, _pid = victim
    assert attacker.evaluate(f"os.environ.update(SLURM_JOB_ID='{job}')") is None
    named = {"op": "restore", "job": job, "name": f"slurm-lab-{job}-u2001", "end": True}
    assert refused(attacker.evaluate(f"ask({named!r}, pipes())"), "refused")
    greeting = attacker.evaluate(f"ask({{'op': 'hello', 'job': {job}}}, greet=False)")
    assert greeting["job"] == attacker.job
    assert greeting["checkpoint"] is None
    assert greeting["name"] == f"slurm-lab-{attacker.job}-u{USERS['mal']}"


def test_a_process_in_no_job(cluster: Cluster, attacker: Attacker) -> None:
    """A login on the node, and root, are served nothing."""
    (attacker.home / "outside.py").write_text(
        HOSTILE.partition("n = 0")[0] + "print(json.dumps(ask({'op': 'hello'}, greet=False)))"
    )
    script = attacker.home / "outside.py"
    for uid in (USERS["mal"], 0):
        enter = f"setpriv --reuid={uid} --regid={uid} --clear-groups"
        said = cluster.nodes["n1"].sh(f"SLURM_JOB_ID={attacker.job} {enter} python3 -S {script}")
        assert refused(json.loads(said)), said


def test_a_pid_that_is_used_again(attacker: Attacker) -> None:
    """The pidfd of a process that has ended names nothing, whatever has its number now."""
    assert not attacker.evaluate("stale()")["ok"]


def test_hostile_requests(attacker: Attacker) -> None:
    """Neither length, nesting, descriptors nor types do more than end the connection."""
    for expression in (
        "ask(b'x' * 150000)",
        "ask(b'[' * 16000)",
        "ask(b'{\"op\": ' + b'9' * 12000 + b'}')",
        "ask(b'\\xff\\x00')",
        "ask([1])",
        "ask({'op': ['start']})",
        "ask({'op': 'start'}, [0] * 200)",
        "ask({'op': 'start'}, [0, 1, 2])",
        "ask({'op': 'start'}, [os.memfd_create('x')] + pipes())",
        "ask({'op': 'checkpoint', 'end': 'yes'})",
        "ask({'op': 'ended', 'code': 10**400})",
        "ask({'op': 'restore'}, [])",
        "ask({'op': 'dump', 'target': 1}, greet=False)",
    ):
        answer = attacker.evaluate(expression)
        assert not answer.get("ok"), (expression, answer)
        assert "service failed" not in str(answer), (expression, answer)
    assert attacker.evaluate("ask({'op': 'hello'}, greet=False)")["ok"]


def test_streams_that_are_files(cluster: Cluster, attacker: Attacker) -> None:
    """A restored program's output goes to pipes that the job has passed: to no file, link or
    terminal, and nothing is opened by a name.
    """
    (attacker.home / "link").unlink(missing_ok=True)
    (attacker.home / "link").symlink_to("/etc/passwd")
    for stream in ("os.open('link', os.O_RDONLY)", "os.open('own', os.O_RDWR | os.O_CREAT)", "0"):
        answer = attacker.evaluate(
            f"ask({{'op': 'start'}}, [os.pidfd_open(child()), {stream}, {stream}])"
        )
        assert refused(answer, "data"), answer
    reading = "[os.pidfd_open(child()), os.pipe()[0], os.pipe()[0]]"
    assert refused(attacker.evaluate(f"ask({{'op': 'start'}}, {reading})"), "data")


def test_a_set_uid_program_in_the_tree(cluster: Cluster, attacker: Attacker) -> None:
    """A tree that holds more than its user's rights is not stored, and runs on."""
    sleeps = cluster.folder / "sleeps"
    shutil.copy("/usr/bin/sleep", sleeps)
    cluster.sh(f"chown 0:0 {sleeps}; chmod 4755 {sleeps}")
    script = f"{RUN} --every 1s -- sh -c '{sleeps} 1000; true'"
    job = cluster.submit("mal", script, "-w", "n1")
    try:
        cluster.wait_output("mal", job, "is also user 0")
        assert cluster.nodes["n1"].sh(f"pgrep -f '{sleeps} 1000'")
        assert not cluster.nodes["n1"].criuctl(
            "list", f"slurm-lab-{job}-u{USERS['mal']}", "-q", check=False
        )
    finally:
        cluster.sh(f"scancel --full --signal=KILL {job}")


def test_an_end_that_is_none(attacker: Attacker) -> None:
    """A program that runs cannot be reported as ended, to have its checkpoints removed."""
    answer = attacker.evaluate("[say(begun(child())[0], {'op': 'ended', 'code': 0})][0]")
    assert refused(answer, "refused"), answer


def test_one_connection_of_a_job(attacker: Attacker) -> None:
    """A second connection of the job is refused while the first one lasts."""
    answer = attacker.evaluate("(lambda s: (say(s, {'op': 'hello'}), ask({'op': 'x'})))(connect())")
    assert answer[0]["ok"]
    assert refused(answer[1], "conflict")


def test_many_connections(cluster: Cluster, attacker: Attacker) -> None:
    """A user's connections have a limit, and other users' jobs are served meanwhile."""
    held = attacker.evaluate(
        "[globals().setdefault('held', []).append(connect()) for _ in range(90)]"
    )
    assert len(held) == 90
    job = cluster.submit("ada", f"{RUN} -- echo served", "-w", "n1")
    cluster.wait_output("ada", job, "served")
    closed = attacker.evaluate("[held.pop().close() for _ in range(90)]")
    assert len(closed) == 90


def test_a_file_that_becomes_a_link_to_one_of_root_s(cluster: Cluster) -> None:
    """What the program has open comes back only as what its user may open."""
    secret = cluster.folder / "secret"
    secret.write_text("root's own\n")
    secret.chmod(0o600)
    home = cluster.home("mal")
    (home / "writes.py").write_text(
        "import os, time\n"
        "file = open('log', 'a')\n"
        "print('opened', flush=True)\n"
        "while True:\n"
        "    print('mine', file=file, flush=True)\n"
        "    time.sleep(0.1)\n"
    )
    job = cluster.submit("mal", f"{RUN} -- /usr/bin/python3 -S writes.py", "-w", "n1")
    cluster.wait_output("mal", job, "opened")
    cluster.sh(f"scancel --batch --signal=USR1 {job}")
    cluster.wait_output("mal", job, "criuctl: checkpoint")
    cluster.sh(f"cd {home}; mv log before; ln -s {secret} log", uid=USERS["mal"])
    cluster.wait_state(job, "FAILED", "RUNNING")
    wait_until(
        lambda: cluster.state(job) == "FAILED" or "restored" in cluster.output("mal", job),
        PATIENCE,
        cluster.output("mal", job),
    )
    cluster.sh(f"scancel {job}", check=False)
    assert secret.read_text() == "root's own\n"


def test_a_file_of_a_process_that_runs_a_set_uid_program_since(cluster: Cluster) -> None:
    """The service, which is root, opens no file of /proc for a job's program that its user may not
    open now.
    """
    home, node = cluster.home("mal"), cluster.nodes["n1"]
    sleeps = cluster.folder / "becomes-root"
    shutil.copy("/usr/bin/sleep", sleeps)
    cluster.sh(f"chown 0:0 {sleeps}; chmod 4755 {sleeps}")
    other = (
        f"echo $$ > {home}/other; until [ -e {home}/go ]; do sleep 0.1; done; exec {sleeps} 1000"
    )
    user = f"setpriv --reuid={USERS['mal']} --regid={USERS['mal']} --clear-groups"
    node.sh(f"{user} setsid -f sh -c '{other}' >/dev/null 2>&1 </dev/null")
    wait_until((home / "other").exists, PATIENCE, "the other process runs")
    pid = int((home / "other").read_text())
    (home / "holds.py").write_text(
        "import os, time\n"
        f"fd = os.open('/proc/{pid}/environ', os.O_RDONLY)\n"
        "print('opened', flush=True)\n"
        "while True:\n"
        "    with open('draft', 'w') as file:\n"
        "        file.write(repr(os.pread(fd, 4096, 0)))\n"
        "    os.rename('draft', 'read')\n"
        "    time.sleep(0.1)\n"
    )
    job = cluster.submit("mal", f"{RUN} -- /usr/bin/python3 -S holds.py", "-w", "n1")
    cluster.wait_output("mal", job, "opened")
    try:
        cluster.sh(f"scancel --batch --signal=USR1 {job}")
        cluster.wait_output("mal", job, "criuctl: checkpoint")
        (home / "go").touch()
        uid = f"grep -c 'Uid:.*[[:space:]]0' /proc/{pid}/status || true"
        wait_until(lambda: node.sh(uid).strip() == "1", PATIENCE, "it runs the set-uid program")
        cluster.wait_output("mal", job, "restored")
        (home / "read").unlink(missing_ok=True)
        wait_until((home / "read").exists, PATIENCE, "what the restored program reads")
        assert (home / "read").read_text() == "b''"
    finally:
        node.sh(f"kill -9 {pid}", check=False)
        cluster.sh(f"scancel --full --signal=KILL {job}", check=False)

"""The core of the adapters, without an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from support.engines import Job
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

from criuctl import Session
from criuctl.adapters import task_session
from criuctl.adapters.task_session import Program, Task, begin, end, end_run, run, run_async
from criuctl.errors import CommandFailed, NotFound
from criuctl.sdk import SessionInfo

pytestmark = pytest.mark.integration

TASK = Task("run 1", "build/all")


def sh(line: str) -> Program:
    """A line of shell."""
    return Program(["sh", "-c", line])


def begun(task: Task, program: Program) -> Session:
    """The session of a task that runs."""
    found = begin(task, program)
    assert isinstance(found, Session)
    return found


def kill_all(holder: int, known: SessionInfo) -> None:
    """Kill the holder, and what it leaves."""
    os.kill(holder, signal.SIGKILL)
    for pid in (holder, known.pid or holder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), TIMEOUT, f"{pid} has ended")


def test_attempts_at_once_have_one_session_and_one_exit_code(job: Job) -> None:
    offsets: list[int] = []

    def attempt(_: int) -> int:
        return run(TASK, Program([str(job.program)]), beat=offsets.append, interval=0.1)

    with ThreadPoolExecutor(4) as pool:
        codes = pool.map(attempt, range(4))
        try:
            session = job.running()
            wait_until(lambda: offsets.count(9) > 4, TIMEOUT, "they report the offset")
            job.check_same(session)
        finally:
            job.finish()
        assert list(codes) == [3, 3, 3, 3]
    assert session.name == TASK.session and session.labels["task"] == TASK.task
    assert run(TASK, sh("exit 4")) == 3  # it has ended, and is not run again
    assert job.times("begun") == 1 and not end(TASK)


def test_a_failure_that_was_reported_is_tried_again(operators: Operators) -> None:
    Path("code").write_text("5")
    program = sh('echo "the reason"; read code < code; exit "$code"')
    assert run(TASK, program) == 5
    with pytest.raises(CommandFailed) as failed:
        run(TASK, program, check=True)
    assert "exit code 5\nthe reason" in failed.value.message and failed.value.details["status"] == 5
    Path("code").write_text("0")
    assert run(TASK, program, check=True) == 0
    Path("code").write_text("6")
    assert run(TASK, program, check=True) == 0


def test_several_that_end_it_at_once(job: Job) -> None:
    """The program gets one SIGTERM, and a later attempt starts it again."""
    with begun(TASK, Program([str(job.program)])) as session:
        known = job.running()
        assert session.name == known.name
        audit = Path(session.status().facts["audit"])
    (job.folder / "hold").touch()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(end, TASK)
        wait_until(lambda: job.times("ended"), TIMEOUT, "it has SIGTERM")
        second = pool.submit(end, TASK)
        wait_until(lambda: audit.read_text().count('"kill"') == 2, TIMEOUT, "the second asks")
        (job.folder / "hold").unlink()
        ended = [first.result(), second.result()]
    assert any(ended), "one of them, or both, found it running"
    job.check_ended(known)
    job.finish()
    assert run(TASK, Program([str(job.program)])) == 3


def test_a_run_ends_with_all_of_its_tasks_and_no_others(operators: Operators) -> None:
    mine, other = [Task("run 1", "a"), Task("run 1", "b")], Task("run 2", "a")
    sessions = [begun(task, sh("sleep 1000")) for task in (*mine, other)]
    labelled = Session.run(["sleep", "1000"], name="another", labels={"run": "run 1", "task": "a"})
    assert sorted(end_run("run 1")) == sorted(task.session for task in mine)
    assert end_run("run 1") == []
    assert {one.name for one in Session.list()} == {other.session, "another"}
    for session in (*sessions, labelled):
        session.close()


@pytest.mark.parametrize("at", ["start", "wait"])
def test_cancelling_ends_it_also_while_it_is_started(
    job: Job, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    starting = threading.Event()
    real = task_session.begin

    def slow(task: Task, program: Program) -> Session | int:
        starting.set()
        found = real(task, program)
        job.running()
        return found

    monkeypatch.setattr(task_session, "begin", slow)

    async def main() -> None:
        call = asyncio.create_task(run_async(TASK, Program([str(job.program)])))
        await asyncio.to_thread(starting.wait, TIMEOUT)
        if at == "wait":
            session = await asyncio.to_thread(job.running)
            await asyncio.to_thread(job.attached, session)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    assert Session.list() == [] and (job.times("begun"), job.times("ended")) == (1, 1)


def test_what_the_heartbeat_raises_leaves_it_running(job: Job) -> None:
    def beat(offset: int) -> None:
        raise OSError(f"no engine at {offset}")

    for _ in range(2):
        with pytest.raises(OSError, match="no engine"):
            run(TASK, Program([str(job.program)]), beat=beat)
    job.check_same(known := job.running())
    job.finish()  # while no attempt waits
    wait_until(lambda: not Path(f"/proc/{known.pid}").exists(), TIMEOUT, "it has ended")
    assert run(TASK, Program([str(job.program)])) == 3


@pytest.mark.parametrize("how", ["dumped", "killed"])
def test_an_attempt_restores_it(job: Job, operators: Operators, how: str) -> None:
    """Dumped, after which its holder is gone as after a boot; or killed, after a snapshot."""
    with begun(TASK, Program([str(job.program)])) as session:
        known = job.running()
        (session.dump if how == "dumped" else session.snapshot)()
        holder = session.status().facts["holder_pid"]
    kill_all(holder, known)
    with begun(TASK, Program([str(job.program)])) as again:
        assert (again.id, again.status().incarnation) == (known.id, 2)
    job.finish()
    assert run(TASK, Program([str(job.program)])) == 3 and job.times("begun") == 1


def test_one_that_was_lost_without_a_checkpoint_is_started_again(job: Job) -> None:
    with begun(TASK, Program([str(job.program)])) as session:
        known = job.running()
        holder = session.status().facts["holder_pid"]
    kill_all(holder, known)
    job.finish()
    assert run(TASK, Program([str(job.program)])) == 3 and job.times("begun") == 2


def test_following_needs_a_session(operators: Operators) -> None:
    with pytest.raises(NotFound):
        asyncio.run(task_session.follow(TASK))
    assert run(TASK, sh("exit 2")) == 2
    assert asyncio.run(task_session.follow(TASK)) == 2


def test_a_session_that_was_dumped_here_is_waited_for_aloud(
    operators: Operators, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(run, TASK, sh("read code; exit 7"), interval=0.2)
        wait_until(lambda: bool(Session.list()), TIMEOUT, "it runs")
        operators("dump", TASK.session)
        said = f"criuctl restore {TASK.session}"
        wait_until(lambda: said in caplog.text, TIMEOUT, "it says that it waits")
        operators("restore", TASK.session)
        operators("send", TASK.session, "--enter")
        assert waits.result(TIMEOUT) == 7

"""A user holds files of /proc, and of other file systems that the kernel fills, whose permission
was checked when they were opened.  A restore opens them with the holder's own rights, at a moment
when every process has its own, or gives the file of a process that has ended.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.identity import inner_pid
from support.keeper import wait_until
from support.laboratory import PROGRAM, USER, Laboratory

pytestmark = pytest.mark.integration

PYTHON = [os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM]
# Root may not restore every capability here, so a set-uid program is to gain none.
PLAIN_USER = ["setpriv", "--bounding-set=-all", f"--reuid={USER}", f"--regid={USER}"]
AS_USER = [*PLAIN_USER, "--clear-groups", "--"]
SECRET = "the-hashes-of-root"


@pytest.fixture
def set_uid(lab: Laboratory) -> Path:
    """A set-uid program of root's, which sleeps."""
    program = lab.folder.parent / "sleeps"
    shutil.copy("/usr/bin/sleep", program)
    program.chmod(0o4755)
    return program


Starts = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def on_host(lab: Laboratory) -> Iterator[Starts]:
    """Starts a shell of the user's on the host, which waits for a line at a `read`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str) -> subprocess.Popen[bytes]:
        environment = {"SECRET": SECRET, "PATH": os.environ["PATH"], "CZOO_TOKEN": lab.token}
        shell = [*AS_USER, "sh", "-c", script]
        started.append(subprocess.Popen(shell, stdin=subprocess.PIPE, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def uid_of(pid: int) -> int:
    """The effective user of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^Uid:\s+\d+\s+(\d+)", status, re.MULTILINE)[0])


def become_set_uid(process: subprocess.Popen[bytes]) -> None:
    """Have the waiting shell go on to a set-uid program."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    wait_until(lambda: uid_of(process.pid) == 0, 30, "the set-uid program runs")


def at_number(lab: Laboratory, number: int, *command: str) -> None:
    """Give the next process inside this PID, or the next free one; run `command` as the user."""
    last = f"echo {number - 1} > /proc/sys/kernel/ns_last_pid"
    run = f"setsid setpriv --reuid={USER} --regid={USER} --clear-groups {' '.join(command)} &"
    subprocess.run(
        [*lab.identity.prefix, "sh", "-c", f"{last}; {run if command else ''}"],
        check=True,
        timeout=60,
    )


def free_number() -> int:
    """A PID that the host does not have, and will not give soon."""
    last = int(Path("/proc/sys/kernel/ns_last_pid").read_text())
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    return (last + most // 2) % (most - 1000) + 500


def stack_of(pid: int) -> int:
    """Where the environment of a process ends."""
    line = next(
        line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "[stack]" in line
    )
    return int(line.split()[0].split("-")[1], 16) - 4096


def holder_of(lab: Laboratory, other: int, name: str, flags: int) -> int:
    """A program of the user's that has a file of the process `other` open, both inside."""
    at_number(lab, other, "sleep", "1000")
    at_number(lab, free_number())
    return lab.start((f"/proc/{other}/{name}", flags))


def read(lab: Laboratory, pid: int, address: int = 0) -> str:
    """What the restored program reads of its file."""
    return lab.ask(pid, f"os.pread(opened[0], 4096, {address})")


def nothing(text: str) -> bool:
    """Whether it reads as the file of a process that has ended."""
    return text == "b''" or "ProcessLookupError" in text


@pytest.mark.parametrize(
    ("name", "flags"),
    [("mem", os.O_RDWR), ("environ", os.O_RDONLY), ("task/{pid}/maps", os.O_RDONLY)],
)
def test_a_process_that_runs_a_set_uid_program_since(
    lab: Laboratory, on_host: Starts, set_uid: Path, name: str, flags: int
) -> None:
    """It has the same PID, and runs since before the dump; its memory is root's now."""
    other = on_host(f"read line; exec {set_uid} 1000")
    pid = holder_of(lab, other.pid, name.format(pid=other.pid), flags)
    report = lab.dump(pid)
    become_set_uid(other)
    restored = lab.restore(report["checkpoint"])
    said = read(lab, restored["pid"], stack_of(other.pid) if name == "mem" else 0)
    assert nothing(said), said
    assert [w for w in restored["warnings"] if f"/proc/{other.pid}/" in w], restored["warnings"]
    if name == "mem":
        wrote = lab.ask(restored["pid"], f"os.pwrite(opened[0], b'x', {stack_of(other.pid)})")
        assert wrote == "0" or "Error" in wrote


def test_a_process_that_is_still_the_user_s(lab: Laboratory, on_host: Starts) -> None:
    """The user may open it now, so the program has it again."""
    other = on_host("read line; exec sleep 1000")
    wait_until(lambda: uid_of(other.pid) == USER, 30, "it runs as the user")
    report = lab.dump(holder_of(lab, other.pid, "environ", os.O_RDONLY))
    pid = lab.restore(report["checkpoint"])["pid"]
    assert SECRET in read(lab, pid)


def with_child(lab: Laboratory, path: str, flags: int, script: str) -> int:
    """A program of the user's that opens this file of its child, a shell, which then goes on."""
    pid = lab.start(uid=0, inside=True, argv=[*AS_USER, *PYTHON, str(lab.folder)])
    shell = f"['sh', '-c', {script!r}]"
    lab.ask(pid, f"opened.append(__import__('subprocess').Popen({shell}, stdin=-1))")
    lab.ask(pid, f"opened.insert(0, os.open(f'/proc/{{opened[0].pid}}/{path}', {flags}))")
    lab.ask(pid, "(opened[1].stdin.write(b'x\\n'), opened[1].stdin.flush())")
    return pid


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.parametrize("name", ["mem", "task/{opened[0].pid}/environ"])
def test_a_child_that_runs_a_set_uid_program(lab: Laboratory, set_uid: Path, name: str) -> None:
    """The program had the file of what the child was before, which reads as ended."""
    pid = with_child(
        lab, name, os.O_RDWR if name == "mem" else os.O_RDONLY, f"read line; exec {set_uid} 1000"
    )
    wait_until(lambda: uid_of(child_of(pid)) == 0, 30, "the set-uid program runs")
    lab.criuctl.prefix = lab.identity.prefix
    findings = lab.criuctl("check", inner_pid(pid))["findings"]
    (warned,) = [one for one in findings if one["code"] == "proc-refused"]
    assert warned["level"] == "warning" and warned["pid"] == inner_pid(pid) and warned["hint"]
    assert warned["fd"] is not None and name.rpartition("/")[2] in warned["text"]
    report = lab.dump(pid)
    pid = lab.restore(report["checkpoint"])["pid"]
    child = child_of(pid)
    assert uid_of(child) == 0 and uid_of(pid) == USER
    said = read(lab, pid, stack_of(child) if name == "mem" else 0)
    os.kill(child, signal.SIGKILL)
    assert nothing(said), said


def test_a_child_that_is_the_user_s(lab: Laboratory) -> None:
    """The program has its memory open again, at the place where it stood."""
    pid = with_child(lab, "mem", os.O_RDWR, "read line; exec sleep 1000")
    wait_until(lambda: Path(f"/proc/{child_of(pid)}/comm").read_text() == "sleep\n", 30, "sleep")
    lab.ask(pid, "os.lseek(opened[0], 4096, 0)")
    report = lab.dump(pid)
    pid = lab.restore(report["checkpoint"])["pid"]
    assert "CZOO_TOKEN=" in read(lab, pid, stack_of(child_of(pid)))
    assert lab.ask(pid, "os.lseek(opened[0], 0, 1)") == "4096"


@pytest.mark.parametrize("how", ["at once", "lazily", "stopped"])
def test_its_own_files(lab: Laboratory, how: str) -> None:
    """A program of a user's has its own files again, where they stood, shared and as its folder;
    what the kernel shows only to root is not shown.
    """
    pid = lab.start()
    me = "/proc/self"
    task = f"{me}/task/{{os.getpid()}}/maps"
    for name in (f"{me}/environ", f"{me}/pagemap", f"{me}/fdinfo/0", f"{me}/stat"):
        lab.ask(pid, f"opened.append(os.open({name!r}, os.O_RDONLY))")
    lab.ask(pid, f"opened.append(os.open(f{task!r}, os.O_RDONLY))")
    lab.ask(
        pid,
        "os.lseek(opened[0], 3, 0), opened.append(os.dup(opened[0])), os.chdir('/proc/self/fd')",
    )
    environ = lab.ask(pid, "os.pread(opened[0], 4096, 0)")
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
        status = Path(f"/proc/{pid}/status").read_text()
        entered = int(re.findall(r"^PPid:\s+(\d+)", status, re.MULTILINE)[0])
        os.kill(entered, signal.SIGKILL)  # nsenter stops with its child, and would not reap it
    report = lab.dump(pid)
    pid = lab.restore(report["checkpoint"], *(["--lazy"] if how == "lazily" else []))["pid"]
    if how == "stopped":
        assert "State:\tT" in Path(f"/proc/{pid}/status").read_text()
        os.kill(pid, signal.SIGCONT)
    assert lab.ask(pid, "os.pread(opened[0], 4096, 0)") == environ
    assert lab.ask(pid, "os.pread(opened[2], 4, 0), os.pread(opened[3], 9, 0).split()[0]") == (
        f"(b'pos:', b'{inner_pid(pid)}')"
    )
    assert "/python" in lab.ask(pid, "os.read(opened[4], 1 << 16)")
    assert lab.ask(pid, "os.lseek(opened[5], 1, 1), os.lseek(opened[0], 0, 1)") == "(4, 4)"
    assert (
        lab.ask(pid, "os.getcwd(), os.path.exists('0')") == f"('/proc/{inner_pid(pid)}/fd', True)"
    )
    page = stack_of(pid) // 4096 * 8
    entry = f"int.from_bytes(os.pread(opened[1], 8, {page}), 'little')"
    assert lab.ask(pid, f"{entry} >> 63, {entry} & (1 << 55) - 1") == "(1, 0)"


def test_a_file_in_a_message(lab: Laboratory, on_host: Starts, set_uid: Path) -> None:
    """No process has it yet, and each of the tree could receive it."""
    other = on_host(f"read line; exec {set_uid} 1000")
    pid = holder_of(lab, other.pid, "environ", os.O_RDONLY)
    lab.ask(pid, "opened.extend(__import__('socket').socketpair())")
    send = "__import__('socket').send_fds(opened[1], [b'x'], [opened[0]])"
    lab.ask(pid, f"{send}, os.close(opened.pop(0))")
    report = lab.dump(pid)
    become_set_uid(other)
    pid = lab.restore(report["checkpoint"])["pid"]
    receive = "__import__('socket').recv_fds(opened[1], 1, 1)[1][0]"
    said = lab.ask(pid, f"os.pread({receive}, 4096, 0)")
    assert nothing(said), said


@pytest.fixture
def group(lab: Laboratory) -> Iterator[Path]:
    """A control group."""
    for place in sorted(Path("/sys/fs/cgroup").glob("*/cgroup.procs")):
        folder = place.parent / lab.token
        try:
            folder.mkdir()
        except OSError:
            continue
        yield folder
        folder.rmdir()
        return
    raise AssertionError("no control group can be made here")


def test_a_control_group_acts_with_the_user_s_rights(lab: Laboratory, group: Path) -> None:
    """What is written is judged by the rights of the process that opened the file: the restored
    program has opened it itself, and moves no process of root's.
    """
    procs = group / "cgroup.procs"
    os.chown(procs, USER, USER)
    at_number(lab, free_number())
    report = lab.dump(lab.start((procs, os.O_WRONLY)))
    pid = lab.restore(report["checkpoint"])["pid"]
    with subprocess.Popen(["sleep", "1000"]) as roots:
        try:
            said = lab.ask(pid, f"os.write(opened[0], b'{roots.pid}')")
            assert "PermissionError" in said, said
            assert not procs.read_text()
        finally:
            roots.kill()
    lab.end(pid)


def test_a_control_group_that_root_opened(lab: Laboratory, group: Path) -> None:
    """The user may not open it, and its inode proves nothing: the restore is refused, and the dump
    has warned.
    """
    procs = group / "cgroup.procs"
    pid = lab.start((procs, os.O_WRONLY), uid=0, inside=True)
    lab.ask(pid, f"os.chown({str(lab.folder / 'ask')!r}, {USER}, {USER})")
    ids = f"os.setgroups([]), os.setresgid(*[{USER}] * 3), os.setresuid(*[{USER}] * 3)"
    lab.ask(pid, f"{ids}, __import__('ctypes').CDLL(None).prctl(4, 1, 0, 0, 0)")
    report = lab.dump(pid)
    assert [w for w in report["warnings"] if "cgroup.procs" in w], report["warnings"]
    answer = lab.restore(report["checkpoint"], check=False)
    assert answer["exit_code"] == 4, answer
    assert lab.processes() == []
    os.chown(procs, USER, USER)
    pid = lab.restore(report["checkpoint"])["pid"]
    lab.end(pid)


# Runs a command with a session keyring that holds a key.
KEYED = """
import ctypes, os, sys
call = ctypes.CDLL(None).syscall
assert call(250, 1, None) > 0 and call(248, b"user", b"criuctl-secret", b"hashes", 6, -3) > 0
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_root_s_session_keyring(lab: Laboratory) -> None:
    """It would be inherited from the process that restores: the program has an empty one."""
    report = lab.dump(lab.start())
    lab.criuctl.prefix = [sys.executable, "-c", KEYED]
    pid = lab.restore(report["checkpoint"])["pid"]
    search = "syscall(250, 10, -3, b'user', b'criuctl-secret', 0)"
    assert lab.ask(pid, f"__import__('ctypes').CDLL(None).{search}") == "-1"


# -- files at root's paths -------------------------------------------------------------------------


@pytest.fixture
def roots(lab: Laboratory) -> Path:
    """A folder that root alone controls."""
    folder = lab.folder.parent / "roots"
    folder.mkdir(mode=0o755)
    return folder


@pytest.mark.parametrize("way", ["large", "kept", "kept for writing"])
def test_another_file_of_root_s(lab: Laboratory, roots: Path, way: str) -> None:
    """Root has put its own file at the path since, for no other user."""
    file = roots / "file"
    file.write_text("for all")
    file.chmod(0o666)
    if way == "large":
        os.truncate(file, 33 << 20)
    flags = os.O_RDWR if way == "kept for writing" else os.O_RDONLY
    report = lab.dump(lab.start((file, flags)))
    file.rename(roots / "old")
    file.write_text(SECRET)
    file.chmod(0o600)
    options = () if way == "large" else ("--files", "keep")
    answer = lab.restore(report["checkpoint"], *options, check=False)
    assert answer["exit_code"] == 4, answer
    assert "untrusted-path" in {f["code"] for f in answer["error"]["findings"]}
    assert lab.processes() == []
    (roots / "old").rename(file)
    pid = lab.restore(report["checkpoint"], *options)["pid"]
    assert lab.ask(pid, "os.read(opened[0], 7)") == "b'for all'"

"""Every obstacle of the preflight, with a real process; and CRIU asked whether it agrees.

Two promises: what CRIU refuses is found before the freeze, and what CRIU dumps is never refused.
Both are held against the CRIU in use, so a new CRIU or kernel that learns or unlearns something
fails here.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import time
from pathlib import Path

import pytest
from support import groups
from support.obstacles import DUMPABLE, REFUSED, Case, running

from criuctl.config import Config
from criuctl.criu import binary, features
from criuctl.dump.checks import scene
from criuctl.dump.preflight import check_tree
from criuctl.errors import NoSuchProcess
from criuctl.host.target import Target
from criuctl.proc import command, netfilter, tty
from criuctl.proc.descriptors import descriptors
from criuctl.proc.namespaces import entry_prefix, foreign, ns_pids
from criuctl.proc.tree import ProcessIdentity, read_process, read_tree
from criuctl.report import Finding

pytestmark = pytest.mark.integration

CASES = DUMPABLE + REFUSED
# seconds until a state that a program enters after it said that it is ready must show
PATIENCE = 30.0
KNOWING_USER = [
    "--tcp-established",
    "--file-locks",
    "--link-remap",
    "--ext-unix-sk",
    "--skip-in-flight",
    "--ghost-limit=64M",
    "--network-lock=nftables",
]


def _findings(pid: int) -> list[Finding]:
    return check_tree(Target(ProcessIdentity.of(pid)), Config())


def _settled(pid: int, case: Case) -> list[Finding]:
    deadline = time.monotonic() + PATIENCE
    while True:
        found = _findings(pid)
        errors = {f.code for f in found if f.level == "error"}
        others = {f.code for f in found if f.level != "error"}
        if (errors == case.errors and case.others <= others) or time.monotonic() > deadline:
            return found


def _ask_criu(pid: int, found: list[Finding], folder: Path) -> tuple[bool, str]:
    """Whether raw CRIU dumps the tree (and lets it run on), started as criuctl starts it; and its
    log.
    """
    try:
        entered = foreign(pid) & {"mnt", "pid", "net"}
    except NoSuchProcess:
        entered = set()  # a main thread that has ended is in no namespace
    inner = ns_pids(pid)[-1] if "pid" in entered else pid
    options = list(KNOWING_USER)
    if "session-outside" in {f.code for f in found}:
        options.append("--shell-job")
    tree = read_tree(pid)
    opened = {process.pid: descriptors(process.pid) for process in tree if not process.zombie}
    terminals = [
        t
        for t in tty.terminals(tree, opened)
        if t.kind == "pts" and t.holders and not t.master_inside
    ]
    options += [
        f"--external={key}"
        for key in sorted({t.external_key for t in terminals} | tty.alias_keys(tree, opened))
    ]
    outside = {(f.pid, f.fd) for f in found if f.code == "foreign-mount"}
    for holder in {pid for pid, _fd in outside if pid is not None}:
        options += [
            f"--external=file[{d.mnt_id:x}:{d.inode:x}]"
            for d in descriptors(holder)
            if (holder, d.fd) in outside
        ]
    images = folder / "images"
    images.mkdir()
    criu = binary.find(Config()).argv
    argv = [
        *criu,
        "--no-default-config",
        "dump",
        f"--tree={inner}",
        f"--images-dir={images}",
        "--leave-running",
    ]
    argv = [*entry_prefix(pid, entered), *argv, "-v3", "--log-file=log", *options]
    with features.cache_descriptors(criu) as fds:
        done = command.run(argv, timeout=120, check=False, pass_fds=fds)
    log = images / "log"
    log_text = log.read_text(errors="replace") if log.exists() else done.error_text
    # one that ends by its own BUG() leaves its firewall table
    for run_id in re.findall(r"CRIU run id = ([0-9a-f-]{36})", log_text):
        netfilter.delete_table(netfilter.criu_table(run_id))
    return done.returncode == 0, log_text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_obstacle_is_found_and_criu_agrees(case: Case, tmp_path: Path) -> None:
    if case.needs and not os.path.exists(case.needs):
        pytest.skip(f"this machine has no {case.needs}")
    with running(case.program, tmp_path) as program:
        found = _settled(program.pid, case)
        lines = [f"{f.level} {f.code}: {f}" for f in found]
        assert {f.code for f in found if f.level == "error"} == case.errors, lines
        assert case.others <= {f.code for f in found if f.level != "error"}, lines
        for finding in found:
            assert finding.pid is not None or finding.level != "error", (
                "an obstacle names its process"
            )
            assert finding.hint or finding.level == "info", f"{finding.code} says no remedy"
        if case.criu is not None:
            dumped, log = _ask_criu(program.pid, found, tmp_path)
            assert dumped == case.criu, log[-3000:]


def test_process_of_another_user(tmp_path: Path) -> None:
    """CRIU reads a process's limits with prlimit(2), which asks for CAP_SYS_RESOURCE when the ids
    differ.
    """
    status = Path("/proc/self/status").read_text()
    may = (
        int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
        >> 24
        & 1
    )
    tmp_path.chmod(0o755)
    with running(
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)",
        tmp_path,
    ) as program:
        found = _findings(program.pid)
        assert {f.code for f in found if f.level == "error"} == (set() if may else {"foreign-user"})
        dumped, log = _ask_criu(program.pid, found, tmp_path)
        assert dumped == bool(may), log[-3000:]


def test_more_room_for_descriptors_is_all_it_takes(tmp_path: Path) -> None:
    used_up = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128)); f = [os.dup(0) "
        "for _ in range(58)]"
    )
    with running(used_up, tmp_path) as program:
        (finding,) = [f for f in _findings(program.pid) if f.level == "error"]
        assert "`prlimit --pid" in finding.hint
        subprocess.run(finding.hint.split("`")[1].split(), check=True)
        found = _findings(program.pid)
        assert not [f for f in found if f.level == "error"]
        dumped, log = _ask_criu(program.pid, found, tmp_path)
        assert dumped, log[-3000:]


def test_descriptor_that_no_restore_has_room_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU raises its own limit as far as it may; here it may not."""
    monkeypatch.setattr(scene, "effective_capabilities", lambda: 0)
    # a table for many more takes much memory
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 16)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    highest = limit // 128 * 128 - 32
    raised = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    for number, expected in ((highest, set[int | None]()), (highest + 1, {highest + 1})):
        with running(f"{raised}; os.dup2(0, {number})", tmp_path) as program:
            found = [f for f in _findings(program.pid) if f.code == "descriptor-number"]
            assert {f.fd for f in found} == expected


def test_more_shared_memory_than_a_restore_has_descriptors(tmp_path: Path) -> None:
    """CRIU has a descriptor of each mapping at once, and here it may not have more than we."""
    made = "import mmap; m = [mmap.mmap(-1, 4096) for _ in range(300)]"
    with running(made, tmp_path) as program, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene, "effective_capabilities", lambda: 0)
        assert "shared-mappings" not in {f.code for f in _findings(program.pid)}
        patch.setattr(resource, "getrlimit", lambda _which: (320, 320))
        (finding,) = [f for f in _findings(program.pid) if f.code == "shared-mappings"]
        assert (
            finding.level == "error"
            and "300 mappings" in finding.text
            and "320 in all" in finding.text
        )


def test_shared_descriptor_is_reported_once(tmp_path: Path) -> None:
    with running(
        "f = os.open('/dev/fuse', os.O_RDWR); [child(lambda: None) for _ in range(3)]", tmp_path
    ) as program:
        assert [f.code for f in _findings(program.pid) if f.level == "error"] == ["device"]


def _obstacles(pid: int) -> list[Finding]:
    return [f for f in _findings(pid) if f.level == "error"]


def test_tree_inside_is_reported_once_by_its_first_process(tmp_path: Path) -> None:
    text = (
        "def inner():\n libc.unshare(0x0C000000); [child(lambda: child(lambda: None)) for _ in "
        "range(2)]\n"
        "pid = child(inner); open(TMP + '/pid', 'w').write(str(pid))"
    )
    with running(text, tmp_path) as program:
        inner = int((tmp_path / "pid").read_text())
        (finding,) = _obstacles(program.pid)
        assert (finding.code, finding.pid) == ("nested-namespace", inner)
        assert "IPC and UTS" in str(finding)
        assert f"PID {inner}" in finding.hint
        assert not _obstacles(inner), "what the hint says can be done"


def test_time_namespace_names_the_child_that_can_be_dumped(tmp_path: Path) -> None:
    text = (
        "assert libc.unshare(0x80) == 0; pid = child(lambda: None); open(TMP + '/pid', "
        "'w').write(str(pid))"
    )
    with running(text, tmp_path) as program:
        inner = int((tmp_path / "pid").read_text())
        outer = next(f for f in _obstacles(program.pid) if f.pid == program.pid)
        assert f"PID {inner}" in outer.hint
        found = _findings(inner)
        assert not [f for f in found if f.level == "error"]
        dumped, log = _ask_criu(inner, found, tmp_path)
        assert dumped, log[-3000:]


def test_descriptor_and_process_are_named(tmp_path: Path) -> None:
    text = (
        "def run():\n global r, w\n r, w = os.pipe2(os.O_DIRECT)\npid = child(run); open(TMP + "
        "'/pid', 'w').write(str(pid))"
    )
    with running(text, tmp_path) as program:
        found = [f for f in _findings(program.pid) if f.level == "error"]
        assert {f.pid for f in found} == {int((tmp_path / "pid").read_text())} != {program.pid}
        assert found[0].fd is not None
        assert found[0].fd > 2


def test_tracer_is_named(tmp_path: Path) -> None:
    traced = next(case for case in REFUSED if case.name == "traced")
    with running(traced.program, tmp_path) as program:
        (finding,) = [f for f in _findings(program.pid) if f.code == "traced"]
        assert f" {read_process(program.pid).tracer_pid} (" in finding.text


@pytest.mark.parametrize(
    ("scope", "engine", "remedy"),
    [
        ("docker-{}.scope", "a Docker container", "`docker checkpoint create {} NAME`"),
        ("libpod-{}.scope", "a podman container", "checkpoint --export FILE {}`"),
        ("user.slice/libpod-{}.scope", "a podman container", "containers of root alone"),
        ("machine-x.scope", "a container of systemd-nspawn", "systemd-nspawn cannot checkpoint"),
    ],
)
def test_a_container_is_named_first_with_what_its_engine_offers(
    scope: str, engine: str, remedy: str, tmp_path: Path
) -> None:
    """The remedies of all else that is found there do not help."""
    top = _mount_of("cgroup", "pids") or _mount_of("cgroup2", "")
    assert top is not None, "no control group file system is mounted on this machine"
    own_root = next(case for case in REFUSED if case.name == "root-of-its-own").program
    digits = f"{os.getpid():064x}"
    group = Path(top) / f"criuctl-{os.getpid()}" / scope.format(digits)
    group.mkdir(parents=True)
    try:
        with running(f"{own_root}\nassert libc.unshare(0x80) == 0", tmp_path) as program:
            (group / "cgroup.procs").write_text(str(program.pid))
            first, *others = _obstacles(program.pid)
    finally:
        while group != Path(top):
            groups.remove(group)
            group = group.parent
    assert others
    assert first.code == "own-root"
    assert f"is in {engine}" in first.text
    assert remedy.format(digits[:12]) in first.hint


def test_other_end_of_unix_connection_is_named(tmp_path: Path) -> None:
    outside = next(case for case in CASES if case.name == "unix-stream-outside")
    # The outer process keeps its own copies of both ends.
    with running(outside.program, tmp_path) as program:
        (finding,) = [f for f in _findings(program.pid) if f.code == "unix-peer-outside"]
        assert str(program.outer) in finding.text
        assert f"{tmp_path}/s" in finding.text


def test_other_end_of_a_pipe_is_named(tmp_path: Path) -> None:
    with running("r, w = outside(os.pipe); os.close(r); i, o = os.pipe()", tmp_path) as program:
        (finding,) = [f for f in _findings(program.pid) if f.level == "warning"]
        assert str(program.outer) in finding.text
        assert "SIGPIPE" in finding.text
    with running("r, w = os.pipe(); os.close(r)", tmp_path) as program:
        assert not [f for f in _findings(program.pid) if f.level == "warning"]


def test_a_process_that_reads_a_disk_is_not_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look may meet any process in a moment of uninterruptible sleep; only one that stays there
    is reported.
    """
    monkeypatch.setattr(
        scene,
        "read_tree",
        lambda root: [process._replace(state="D") for process in read_tree(root)],
    )
    with running("child(lambda: None)", tmp_path) as program:
        assert [f.code for f in _findings(program.pid) if f.code == "uninterruptible"] == []


def test_tree_that_is_gone_is_a_finding(tmp_path: Path) -> None:
    with running("", tmp_path) as program:
        target = Target(ProcessIdentity.of(program.pid))
    found = check_tree(target, Config())
    assert [(f.level, f.code) for f in found] == [("error", "no-such-process")]


def test_frozen_control_group_is_found(tmp_path: Path) -> None:
    freezer = _mount_of("cgroup", "freezer")
    unified = _mount_of("cgroup2", "")
    assert freezer or unified, "no control group file system is mounted on this machine"
    top = Path(freezer or unified or "")
    file, frozen, thawed = (
        ("freezer.state", "FROZEN", "THAWED") if freezer else ("cgroup.freeze", "1", "0")
    )
    group = top / f"criuctl-{os.getpid()}"
    group.mkdir()
    try:
        with running("", tmp_path) as program:
            (group / "cgroup.procs").write_text(str(program.pid))
            assert not [f for f in _findings(program.pid) if f.level == "error"]
            (group / file).write_text(frozen)
            try:
                deadline = time.monotonic() + PATIENCE
                while (
                    not (found := [f for f in _findings(program.pid) if f.code == "frozen"])
                    and time.monotonic() < deadline
                ):
                    pass
                assert found
                assert str(group) in found[0].hint
            finally:
                (group / file).write_text(thawed)
    finally:
        groups.remove(group)


def _mount_of(kind: str, option: str) -> str | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _source, path, fs, options = line.split()[:4]
        if fs == kind and (not option or option in options.split(",")):
            return path
    return None


def test_large_tree_is_checked_fast(tmp_path: Path) -> None:
    many = (
        "for _ in range(99):\n if os.fork() == 0:\n  os.close(READY); f = [os.open('/etc/passwd', "
        "0) for _ in range(17)]; sleep()"
    )
    with running(many, tmp_path) as program:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            assert not [f for f in _findings(program.pid) if f.level == "error"]
            times.append(time.perf_counter() - began)
        assert min(times) < 5.0

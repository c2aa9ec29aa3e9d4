"""What a target says of a tree that wants to come: from made-up needs, some of them hostile."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.manifest import ProcessRecord, SessionRef
from criuctl.config import Config
from criuctl.errors import Damaged, UnsupportedFormat
from criuctl.host.identity import host_info
from criuctl.host.registry import Registry, SessionRecord, boot_id
from criuctl.ops.moving.arrival import Arrival
from criuctl.ops.moving.needs_format import NeededFile, NeededTerminal, Needs, read
from criuctl.ops.moving.target_check import TREE_CHECKS, examine, findings
from criuctl.ops.moving.target_files import judge_files
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Finding
from criuctl.transport import frames

LISTENER = ConnectionRecord(
    pid=1, fd=3, family="inet", type="stream", protocol="tcp", state="listen", local="192.0.2.1:80"
)
KEPT = ConnectionRecord(
    pid=1,
    fd=4,
    family="inet",
    type="stream",
    protocol="tcp",
    state="established",
    local="192.0.2.1:80",
    peer="192.0.2.9:4000",
    external=True,
    policy="keep",
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache"), hook_dirs=()
    )


def needs(**changes: Any) -> Needs:
    made = Needs(
        session=SessionRef("crunch", "1" * 32),
        host=host_info(Config()),
        time=time.time(),
        monotonic=time.monotonic(),
        processes=(ProcessRecord(pid=4194000, ns_pid=4194000, command="crunch"),),
        ids=(4194000,),
        users={"0": "root"},
        groups={"0": "root"},
    )
    return replace(made, **changes)


def ask(
    wanted: Needs, config: Config, clock: float | None = None, *, host: bool = False
) -> list[Finding]:
    sent = json.loads(json.dumps(wanted.to_dict()))
    clock = wanted.time if clock is None else clock
    found = (
        examine(sent, config, clock)
        if host
        else findings(Arrival(read(sent), config, clock), TREE_CHECKS)
    )
    assert [f.level for f in found] == sorted(
        (f.level for f in found), key=["error", "warning", "info"].index
    )
    for finding in found:
        assert finding.hint or finding.level != "error", f"{finding.code} has no remedy"
    # as this machine has them
    return [f for f in found if f.code not in ("capabilities", "pid-max")]


def codes(found: list[Finding], level: str) -> list[str]:
    return [f.code for f in found if f.level == level]


def needed(file: Path, use: str, **changes: Any) -> NeededFile:
    status = file.stat()
    made = NeededFile(
        path=str(file),
        use=use,
        size=status.st_size,
        mode=status.st_mode,
        mtime_ns=status.st_mtime_ns,
    )
    return replace(made, **changes)


def test_nothing_is_missing(config: Config) -> None:
    assert ask(needs(), config, host=True) == []


def test_the_restores_plan_is_asked(config: Config) -> None:
    other = replace(host_info(Config()), arch="m68k", page_size=65536, cpu_flags=("avx1024", "fpu"))
    assert codes(ask(needs(host=other), config), "error") == ["arch", "page-size"]
    lacking = replace(host_info(Config()), cpu_flags=(*host_info(Config()).cpu_flags, "avx1024"))
    (found,) = ask(needs(host=lacking), config)
    assert (found.level, found.code) == ("warning", "cpu")
    assert "avx1024" in found.text


def test_pids(config: Config) -> None:
    found = ask(needs(ids=(os.getpid(),)), config)
    assert [(f.level, f.code) for f in found] == [("info", "pids-private")]
    assert codes(ask(needs(ids=(os.getpid(),), pids="same"), config), "error") == ["pids-taken"]
    wanted = needs(ids=(1 << 30,))
    assert "pid-max" in codes(findings(Arrival(wanted, config, wanted.time), TREE_CHECKS), "error")


def test_the_clocks(config: Config) -> None:
    now = time.time()
    assert ask(needs(time=now), config, now) == []
    (ahead,) = ask(needs(time=now - 3600, monotonic=time.monotonic() - 3600), config, now - 3600)
    assert (ahead.code, ahead.level) == ("clock", "warning")
    said = re.search(r"\b(\d+) s ahead", ahead.text)
    # what has passed meanwhile, rounded
    assert said and 3600 <= int(said[1]) <= 3600 + (time.time() - now) + 0.5
    (behind,) = ask(needs(monotonic=time.monotonic() + 5000), config)
    assert (behind.code, behind.level) == ("monotonic-clock", "warning")
    own = {"time": {"mode": "dumped", "name": None}}
    assert ask(needs(monotonic=time.monotonic() + 5000, namespaces=own), config) == []


def test_a_session_of_that_name(config: Config) -> None:
    here = ProcessIdentity.of(os.getpid())
    Registry(config).put(
        SessionRecord("crunch", pid=here.pid, start_time=here.start_time, boot_id=boot_id())
    )
    (found,) = ask(needs(), config)
    assert (found.level, found.code) == ("error", "conflict")
    assert str(here.pid) in found.text


def test_an_older_criu(config: Config) -> None:
    (found,) = ask(needs(criu=(99, 0, 0)), config, host=True)
    assert (found.level, found.code) == ("warning", "criu-older")
    assert ask(needs(criu=(1, 0)), config, host=True) == []


def test_criu_is_missing(config: Config) -> None:
    found = ask(needs(criu=(4, 2)), replace(config, criu="/nowhere/criu"), host=True)
    assert set(codes(found, "error")) == {"platform"}


def test_users_and_groups(config: Config) -> None:
    found = ask(
        needs(
            users={"0": "toor", "54321": "someone-else", "65000": ""},
            groups={"54321": "root", "0": "root"},
        ),
        config,
    )
    assert codes(found, "warning") == ["user", "user", "group"]
    texts = [f.text for f in found]
    assert "user id 0 is toor on the source and root here" in texts[0]
    assert "someone-else" in texts[1]
    assert "54321 on the source and 0 here" in texts[2]


def test_room(config: Config, tmp_path: Path) -> None:
    assert codes(ask(needs(memory=1 << 50), config), "error") == ["memory"]
    big = NeededFile(
        path=str(tmp_path / "big"), use="written", blocks=1 << 50, mode=0o100644, travels=True
    )
    found = ask(needs(files=(big,)), config)
    assert (codes(found, "error"), codes(found, "warning")) == (["space"], ["space"])


def test_terminals(config: Config) -> None:
    found = ask(
        needs(
            terminals=(
                NeededTerminal("/dev/pts/7", "pts"),
                NeededTerminal("/dev/ttyNO7", "serial", ((9, 1),)),
            )
        ),
        config,
    )
    assert [(f.code, f.pid, f.fd) for f in found] == [("terminal", 9, 1)]


def test_namespaces(config: Config) -> None:
    assert ask(needs(namespaces={"ipc": {"mode": "dumped", "name": None}}), config, host=True) == []


# -- addresses


def test_listeners_need_their_address(config: Config) -> None:
    (found,) = ask(needs(connections=(LISTENER,)), config)
    assert (found.level, found.code, found.fd) == ("error", "address-missing", 3)
    assert "--keep-address 192.0.2.1" in found.hint
    (found,) = ask(needs(connections=(LISTENER,), free_binds=("192.0.2.1:80",)), config)
    assert found.code == "address-missing" and "ip_nonlocal_bind" in found.hint
    free = LISTENER.with_use(family="inet6", local="[2001:db8::1]:80")
    assert codes(ask(needs(connections=(free,)), config), "error") == ["address-missing"]
    assert ask(needs(connections=(free,), free_binds=(free.local,)), config) == []
    assert (
        ask(
            needs(
                connections=(
                    LISTENER.with_use(local="0.0.0.0:4"),
                    LISTENER.with_use(local="127.0.0.1:4"),
                )
            ),
            config,
        )
        == []
    )


def test_kept_connections_need_their_address(config: Config) -> None:
    assert codes(ask(needs(connections=(KEPT,)), config), "error") == ["address"]
    found = ask(needs(connections=(KEPT, LISTENER), keep_addresses=("192.0.2.1@lo-no",)), config)
    assert codes(found, "error") == ["not-found"]
    assert "lo-no" in found[0].text


def test_the_address_of_the_link_cannot_move(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = needs(keep_addresses=("192.0.2.7@lo",))
    assert "address-of-link" not in codes(ask(wanted, config), "error")
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50000 192.0.2.8 22")
    assert "address-of-link" in codes(ask(wanted, config), "error")


def test_an_address_may_be_written_in_another_way(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = LISTENER.with_use(family="inet6", local="[2001:db8::7]:80")
    wanted = needs(connections=(listener,), keep_addresses=("2001:DB8:0::7@lo",))
    assert "address-missing" not in codes(ask(wanted, config), "error")
    monkeypatch.setenv("SSH_CONNECTION", "2001:db8::7 50000 2001:db8::8 22")
    assert "address-of-link" in codes(ask(wanted, config), "error")


# -- files


def test_many_alike_are_summarised(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("four")
    gone = [needed(file, "read", path=str(tmp_path / f"gone-{n}")) for n in range(150)]
    found = ask(needs(files=tuple(gone)), config)
    assert set(codes(found, "error")) == {"file-missing"}
    assert len(found) == 101
    assert found[-1].text.startswith("and 50 more files")


def test_files_that_stay_at_home(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("four")
    file.chmod(0o640)
    assert (
        ask(needs(files=tuple(needed(file, use) for use in ("mapped", "read", "written"))), config)
        == []
    )

    def level(use: str, **changes: Any) -> list[tuple[str, str]]:
        return [
            (f.level, f.code)
            for f in ask(needs(files=(needed(file, use, holders=((7, 3),), **changes),)), config)
        ]

    assert level("mapped", size=5) == [("error", "file-refuse")]
    assert level("read", size=3) == [("info", "file-moved-on")]
    assert level("read", size=5) == [("warning", "file-moved-on")]
    assert level("written", size=5) == [("error", "file-refuse")]
    assert level("written", size=2, append=True) == [("warning", "file-refuse")]
    for use in ("mapped", "read", "written"):
        # other permissions do not matter to a process that has it open
        expected = [] if use == "written" else [("info", "file-moved-on")]
        assert level(use, mode=0o100600) == expected
        assert level(use, mode=0o020640)[0][0] == "error"
    wanted = needed(file, "read", holders=((7, 3),))
    file.unlink()
    for use in ("mapped", "read", "written"):
        (found,) = ask(needs(files=(replace(wanted, use=use),)), config)
        assert (found.level, found.code, found.pid, found.fd) == ("error", "file-missing", 7, 3)
        assert str(file) in found.text


def test_folders(config: Config, tmp_path: Path) -> None:
    assert (
        ask(needs(files=tuple(needed(tmp_path, use) for use in ("cwd", "root", "folder"))), config)
        == []
    )
    there = replace(needed(tmp_path, "cwd"), path=str(tmp_path / "gone"))
    (found,) = ask(needs(files=(there,)), config)
    assert (found.level, found.code) == ("error", "folder-missing")
    assert "--with-files" in found.hint
    for use in ("cwd", "folder"):
        assert ask(needs(files=(needed(tmp_path, use, mode=0o040123),)), config) == []


@pytest.mark.parametrize(
    ("policy", "level", "code"),
    [
        ("restore", "warning", "file-put-back"),
        ("refuse", "error", "file-refuse"),
        ("keep", "info", "file-moved-on"),
    ],
)
def test_files_that_travel(
    config: Config, tmp_path: Path, policy: str, level: str, code: str
) -> None:
    file = tmp_path / "file"
    file.write_text("four")
    same = needed(file, "written", travels=True)
    gone = replace(same, path=str(tmp_path / "deeper/gone"))
    assert ask(needs(files=(same, gone), file_conflicts=policy), config) == []
    (found,) = ask(needs(files=(replace(same, size=5),), file_conflicts=policy), config)
    assert (found.level, found.code) == (level, code)
    (found,) = ask(needs(files=(replace(same, mtime_ns=1),), file_conflicts=policy), config)
    assert (found.level, found.code) == ("info", "file-exists")


def test_the_targets_policy_counts_without_a_wish(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("four")
    other = needs(files=(needed(file, "written", travels=True, size=9),))
    assert codes(ask(other, config), "error") == []
    assert codes(ask(other, replace(config, file_conflicts="refuse")), "error") == ["file-refuse"]


def test_carried_programs_may_be_missing(config: Config, tmp_path: Path) -> None:
    gone = NeededFile(
        path=str(tmp_path / "lib.so"), use="mapped", size=9, mode=0o100755, travels=True
    )
    other = needed(tmp_path, "mapped", size=9, mode=0o100755, travels=True)
    assert ask(needs(files=(gone, other), carry_binaries=True), config) == []
    nowhere = replace(gone, path="/no-such-folder/lib.so")  # the root folder cannot be covered
    (found,) = ask(needs(files=(nowhere,), carry_binaries=True), config)
    assert (found.level, found.code) == (
        "error",
        "file-refuse",
    ) and "mkdir /no-such-folder" in found.hint


def test_carried_programs_of_a_user_in_a_folder_of_root_s(config: Config, tmp_path: Path) -> None:
    """Refused before anything is frozen, as the restore would: not for root's own program, nor for
    a tree of root's.
    """
    here = tmp_path / "here"
    here.write_text("another one")
    theirs = ProcessRecord(pid=7, ns_pid=7, uid=1001)
    for path in (here, tmp_path / "gone"):
        file = NeededFile(
            path=str(path), use="mapped", size=9, mode=0o100755, uid=1001, travels=True
        )
        wanted = needs(files=(file,), carry_binaries=True)
        assert [found.code for found in judge_files(wanted.files, "restore", {0})] == []
        refused = [
            f for f in ask(replace(wanted, processes=(theirs,)), config) if f.code == "file-refuse"
        ]
        assert [f.level for f in refused] == ["error"] and "belongs to user 1001" in refused[0].text
        roots = replace(wanted, files=(replace(file, uid=0),), processes=(theirs,))
        assert not [f for f in ask(roots, config) if f.code == "file-refuse"]


def test_what_blocks_when_opened_is_not_opened(config: Config, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to(fifo)
    lies = [
        NeededFile(path=str(p), use="mapped", size=0, mode=0o100644, build_id="ab" * 20)
        for p in (fifo, link)
    ]
    began = time.monotonic()
    assert codes(ask(needs(files=tuple(lies)), config), "error") == ["file-refuse", "file-refuse"]
    assert time.monotonic() - began < 20


# -- strangers


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"path": "relative", "use": "read"}]},
        {"files": [{"path": "/a/../etc/shadow", "use": "read"}]},
        {"files": [{"path": "/proc/1/root/etc/shadow", "use": "read"}]},
        {"files": [{"path": "/etc/passwd", "use": "execute"}]},
        {"files": [{"path": "/etc/passwd", "use": "read", "size": -1}]},
        {"files": [{"path": "/etc/passwd", "use": "mapped", "build_id": "../x"}]},
        {"files": [{"path": "/etc/passwd", "use": "carried"}]},
        {"files": [{"path": "/etc//passwd", "use": "read"}]},
        {"files": [{"path": "/proc", "use": "cwd"}]},
        {"files": "all"},
        {"files": None},
        {"session": {"name": "../../etc/cron.d/x", "id": "1" * 32}},
        {"session": {"name": "1234", "id": "1" * 32}},
        {"ids": [-1]},
        {"ids": [1 << 40]},
        {"ids": list(range(200_001))},
        {"users": {"root": "root"}},
        {"memory": -1},
        {"memory": "much"},
        {"time": "now"},
        {"pids": "all"},
        {"file_conflicts": "overwrite"},
        {"connections_wish": "steal"},
        {"keep_addresses": ["host.example"]},
        {"namespaces": {"net": {"mode": "entered", "name": "../../x"}}},
        {"namespaces": {"net": {"mode": "entered", "name": 7}}},
        {"namespaces": {"net": {"mode": "elsewhere"}}},
        {"namespaces": {"self": {"mode": "host"}}},
        {"connections": [{"pid": 1, "fd": 1, "family": "inet", "local": "evil.example:80"}]},
        {"connections": [{"pid": 1, "fd": 1, "family": "inet", "local": "1.2.3.4:99999"}]},
        {"connections": [{"pid": 1, "fd": 1, "family": "unix", "peer": "/a\0b"}]},
    ],
)
def test_a_hostile_source_is_refused(config: Config, change: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match="the source's description"):
        examine({**needs().to_dict(), **change}, config, time.time())


def test_an_abstract_name_with_zero_bytes(config: Config) -> None:
    """Many a program passes the whole of a sockaddr_un to bind(2), and all of it is the name."""
    peer = "@" + "agent".ljust(107, "\0")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind("\0" + peer[1:])
        record = ConnectionRecord(
            1, 3, family="unix", type="dgram", peer=peer, external=True, policy="keep"
        )
        assert codes(ask(needs(connections=(record,)), config), "error") == []


def test_another_version(config: Config) -> None:
    with pytest.raises(UnsupportedFormat, match="version 2"):
        examine(
            {**needs().to_dict(), "version": 2, "files": "of another shape"}, config, time.time()
        )
    with pytest.raises(Damaged):
        examine([], config, time.time())  # type: ignore[arg-type]


def test_the_needs_of_a_large_tree_fit_into_a_frame() -> None:
    path = "/srv/data/" + "f" * 60
    files = tuple(
        NeededFile(f"{path}-{n}", "written", size=n, mtime_ns=time.time_ns(), holders=((n, 3),))
        for n in range(50_000)
    )
    connections = tuple(KEPT.with_use(fd=n, peer=f"192.0.2.9:{n}", inode=n) for n in range(50_000))
    record = needs(files=files, connections=connections).to_dict()
    head, *_ = frames.encode(
        frames.ASK, 1, {"verb": "examine", "arguments": {"needs": record, "clock": time.time()}}
    )
    assert frames.decode_header(head[: frames.HEADER.size])[2] < frames.MAX_JSON


def test_needs_come_back_as_they_went() -> None:
    made = needs(connections=(LISTENER, KEPT), files=(NeededFile(path="/a\udcff", use="read"),))
    assert read(json.loads(json.dumps(made.to_dict()))) == made

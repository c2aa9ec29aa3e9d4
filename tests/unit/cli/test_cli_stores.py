"""The commands that look after a store, on real stores in folders; checkpoints are written without
CRIU.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.program import CRIUCTL, clean_environment

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.manifest import (
    HostInfo,
    ImageFile,
    Manifest,
    MemoryImage,
    ProcessRecord,
    SessionRef,
)
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.checkpoint.terminal_records import TerminalRecord
from criuctl.config import Config
from criuctl.host.registry import Registry, SessionRecord, boot_id
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter
from criuctl.store import open_store

Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass
class Place:
    """A store of this test, and a criuctl that is configured to use it."""

    path: Path
    run: Run

    @property
    def env(self) -> dict[str, str]:
        folders = {
            name: str(self.path.parent / name.lower())
            for name in ("STATE_DIR", "CACHE_DIR", "KEY_DIR")
        }
        return {"CRIUCTL_STORE": str(self.path), **{f"CRIUCTL_{k}": v for k, v in folders.items()}}

    def __call__(
        self, *args: str, code: int = 0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = self.run(*args, env={**self.env, **(env or {})})
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *args: str, code: int = 0) -> Any:
        done = self(*args, "--json", code=code)
        return json.loads(done.stdout)

    def write(self, session: str, **more: Any) -> CheckpointSummary:
        """A checkpoint with one page of memory that differs from all others."""
        folders = {
            key: self.env[f"CRIUCTL_{key.upper()}"] for key in ("key_dir", "cache_dir", "state_dir")
        }
        config = Config(store=str(self.path), **folders)  # type: ignore[arg-type]
        store = open_store(str(self.path), config)
        repository = Repository.open(store, config, create_local=True)
        try:
            with repository.writer(Reporter()) as writer:
                writer.add_bytes("images", b"an image")
                writer.add_bytes("entries", struct.pack("<QII", 0x7F0000000000, 1, 6))
                writer.add_bytes("memory", os.urandom(4096))
                writer.add_bytes("file", b"carried")
                writer.wait_hashed()
                manifest = Manifest(
                    id=os.urandom(16).hex(),
                    session=SessionRef(session, "5" * 32),
                    host=HostInfo(name="here\x1b[2J", kernel="6.1", arch="x86_64"),
                    criu={"version": "4.2.1"},
                    criuctl="0.1.0",
                    processes=(
                        ProcessRecord(
                            10, 10, argv=("web", "--port", "80"), command="web", threads=3
                        ),
                        ProcessRecord(11, 11, ppid=10, argv=("worker",), command="worker"),
                    ),
                    images=(ImageFile("core-10.img", 8),),
                    image_data=writer.stream("images"),
                    memory=(
                        MemoryImage(
                            "task", 10, 1, writer.stream("entries"), writer.stream("memory")
                        ),
                    ),
                    terminals=(
                        TerminalRecord(
                            path="/dev/pts/3",
                            master="outside",
                            holders=((10, 0), (10, 1)),
                            leader=10,
                            rows=24,
                            columns=80,
                            echo=False,
                        ),
                    ),
                    connections=(
                        ConnectionRecord(
                            10,
                            3,
                            protocol="tcp",
                            local="10.0.0.1:80",
                            peer="10.0.0.2:5",
                            external=True,
                            policy="hangup",
                        ),
                        ConnectionRecord(
                            10, 4, protocol="tcp", local="127.0.0.1:80", peer="127.0.0.1:9"
                        ),
                    ),
                    files=(
                        FileRecord(
                            "/srv/log",
                            "carried",
                            size=7,
                            data=writer.stream("file"),
                            holders=((10, 5),),
                        ),
                        FileRecord("/usr/bin/web", "mapped", size=100),
                    ),
                    bytes={"memory": 4096, "files": 7, "new": 5000, "stored": 4200},
                    timings={"frozen_ms": 12.5, "total_ms": 99.0},
                    warnings=("one thing",),
                    **more,
                )
                return writer.commit(manifest)
        finally:
            repository.close()
            store.close()

    def objects(self, kind: str) -> list[Path]:
        return sorted(p for p in (self.path / kind).rglob("*") if p.is_file())


@pytest.fixture
def place(criuctl: Run, tmp_path: Path) -> Place:
    return Place(tmp_path / "store", criuctl)


def damage(path: Path) -> None:
    """Flip a bit in the last byte."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_list_is_a_table_for_people_and_an_array_for_programs(place: Place) -> None:
    place("store", "init")
    assert place.json("list") == []
    assert place("list").stderr == "no checkpoints\n"
    first, second = place.write("web", labels={"b": "2", "a": "1"}), place.write("db")
    listed = place.json("list")
    contract = [
        "id",
        "session",
        "number",
        "incarnation",
        "created",
        "host",
        "bytes",
        "labels",
        "pinned",
    ]
    assert [list(entry) for entry in listed] == [contract, contract]
    assert [entry["id"] for entry in listed] == [second.id, first.id]
    assert [entry["id"] for entry in place.json("list", "web")] == [first.id]
    lines = place("list").stdout.splitlines()
    assert lines[0].split() == ["CHECKPOINT", "ID", "CREATED", "MEMORY", "STORED", "HOST", "LABELS"]
    assert re.fullmatch(
        rf"web@1 +{first.id[:12]} +\d+ s ago +4\.0 KiB +4\.1 KiB +here\\x1b\[2J +a=1 b=2", lines[2]
    )
    assert place("list", "-q").stdout.split() == [second.id, first.id]
    assert "no checkpoint of a session named 'nobody'" in place("list", "nobody", code=3).stderr


def on_terminal(place: Place, columns: int, *words: str, **env: str) -> str:
    """What a command writes to a terminal of this width, without the bold of headings."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    environment = {key: value for key, value in place.env.items() if key != "COLUMNS"}
    try:
        place.run(
            *words,
            env={**environment, "TERM": "xterm", **env},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        written = b""
        with contextlib.suppress(OSError):  # EIO: all is read
            while piece := os.read(master, 65536):
                written += piece
    finally:
        os.close(master)
    return re.sub(r"\x1b\[1?m", "", written.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("columns", "headings"),
    [
        (60, "CHECKPOINT ID CREATED STORED"),
        (80, "CHECKPOINT ID CREATED MEMORY STORED"),
        (100, "CHECKPOINT ID CREATED MEMORY STORED HOST LABELS"),
        (200, "CHECKPOINT ID CREATED MEMORY STORED HOST LABELS"),
    ],
)
def test_list_on_a_terminal_fits_it(place: Place, columns: int, headings: str) -> None:
    name = "web-frontend-production"
    found = place.write(name, labels={"tier": "production", "team": "payments"})
    seen = on_terminal(place, columns, "list")
    assert "\x1b" not in seen
    heading, row = seen.splitlines()
    assert heading.split() == headings.split()
    assert row.startswith(f"{name}@1  {found.id[:12]}  ")
    assert len(row) <= columns
    wide = on_terminal(place, columns, "list", COLUMNS="200")
    assert "team=payments tier=production" in wide and "here" in wide


def test_an_unreadable_manifest_is_reported_and_the_others_are_listed(place: Place) -> None:
    place.write("web")
    good = place.write("web")
    data = bytearray(place.objects("checkpoints")[0].read_bytes())
    data[60] ^= 1  # in the head, which a list reads
    place.objects("checkpoints")[0].chmod(0o600)
    place.objects("checkpoints")[0].write_bytes(data)
    for cached in (place.path / ".cache").glob("*"):
        cached.unlink()
    done = place("list", "--json", code=11)
    assert [entry["id"] for entry in json.loads(done.stdout)] == [good.id]
    assert done.stderr.startswith("criuctl: warning: ")
    verdicts = place.json("verify", "--all", code=8)
    assert [v["ok"] for v in verdicts] == [True, False]
    assert place.json("store", "info")["unreadable"] == 1


def test_show_tells_people_and_programs_the_same(place: Place) -> None:
    found = place.write("web", labels={"a": "1"})
    body = place.json("show", "web")
    assert (body["id"], body["session"], body["number"], body["host"]) == (
        found.id,
        "web",
        1,
        "here\x1b[2J",
    )
    assert [p["argv"] for p in body["processes"]] == [["web", "--port", "80"], ["worker"]]
    assert body["memory"] == [{"kind": "task", "id": 10, "pages": 1, "bytes": 4096}]
    assert [(f["path"], f["carried"]) for f in body["files"]] == [
        ("/srv/log", True),
        ("/usr/bin/web", False),
    ]
    assert "chunks" not in json.dumps(body)
    text = place("show", found.id[:8]).stdout
    for words in (
        "web@1",
        "10 web --port 80  [3 threads]\n  `- 11 worker",
        "10.0.0.2:5  hangup",
        "/srv/log",
        "one thing",
        "12 ms of 99 ms",
        "and 1 that are only read or mapped",
    ):
        assert words in text
    assert "\x1b" not in text
    assert "127.0.0.1:9" not in text
    assert (
        place("show", "web@-1", "--tree").stdout == "10 web --port 80  [3 threads]\n`- 11 worker\n"
    )
    assert "inside the tree" in place("show", "web", "--connections").stdout
    assert "/usr/bin/web" in place("show", "web", "--files").stdout
    assert re.search(
        r"/dev/pts/3 +80x24 +10:0, 10:1 +10 +outside +line by line, no echo",
        place("show", "web", "--terminals").stdout,
    )
    assert "7f0000000000  4.0 KiB  lazy present" in place("show", "web", "--maps").stdout
    maps = place.json("show", "web", "--maps")["memory"][0]["maps"]
    assert maps == [
        {"address": 0x7F0000000000, "pages": 1, "bytes": 4096, "flags": ["lazy", "present"]}
    ]
    assert place("show", "web", "-q").stdout == f"{found.id}\n"
    both = place("show", "web", "--tree", "--files").stdout
    assert both.startswith("tree\n")
    assert "\n\nfiles\n" in both


@pytest.mark.parametrize("ref", ["nobody", "web@2", "web@-2", "web@x", "ffffffff", "../web"])
def test_a_ref_that_names_nothing_is_3(place: Place, ref: str) -> None:
    place.write("web")
    assert place.json("show", ref, code=3)["error"]["code"] == "no-such-checkpoint"


def test_verify_finds_damage_and_missing_objects_and_goes_on(place: Place) -> None:
    place.write("a")
    place.write("b")
    assert re.fullmatch(r"a@1: sound, [0-9.]+ KiB checked\n", place("verify", "a").stdout)
    assert [v["ok"] for v in place.json("verify", "--all")] == [True, True]
    assert place("verify", "--all", "-q").stdout == ""
    damage(place.objects("checkpoints")[0])
    verdicts = place.json("verify", "--all", code=8)
    assert sorted(v["ok"] for v in verdicts) == [False, True]
    bad = next(v for v in verdicts if not v["ok"])
    assert bad["error"]["exit_code"] == 8
    assert place.json("verify", bad["session"], code=8)["error"]["code"] == "damaged"
    assert "2 checkpoints, 1 not sound" in place("verify", "--all", code=8).stdout
    for pack in place.objects("packs"):
        pack.unlink()
    verdicts = place.json("verify", "--all", code=8)  # the worst of both
    assert [v["ok"] for v in verdicts] == [False, False]
    assert {v["error"]["code"] for v in verdicts} == {"damaged", "object-missing"}


@pytest.mark.parametrize("ref", ["wbe", "wbe@1", "webb"])
def test_a_mistyped_name_is_answered_by_those_like_it(place: Place, ref: str) -> None:
    for name in ("web", "db", "queue"):
        place.write(name)
    error = place.json("show", ref, code=3)["error"]
    assert error["hint"] == "It has checkpoints of web."
    assert str(place.path) in error["message"]
    assert "`criuctl list`" in place.json("show", "other", code=3)["error"]["hint"]


def test_rm_means_what_was_listed_and_tells_each(place: Place) -> None:
    written = [place.write("web") for _ in range(4)]
    done = place("rm", "web@-1", "web@-2", "nobody", "web@1", written[0].id, code=3)
    assert re.findall(r"removed (web@\d)", done.stdout) == ["web@4", "web@3", "web@1"]
    assert done.stderr.startswith(
        f"criuctl: nobody: the store {place.path} has no checkpoint 'nobody'\n  hint: "
    )
    assert [entry["number"] for entry in place.json("list")] == [2]
    removals = place.json("rm", "web", "web@7", code=3)
    assert [(r["ref"], r["ok"], r["number"]) for r in removals] == [
        ("web", True, 2),
        ("web@7", False, None),
    ]
    assert place.json("list") == []
    assert place.write("web").number == 5  # a number is never used twice


def test_a_damaged_checkpoint_can_be_removed_and_then_garbage_be_collected(place: Place) -> None:
    """Else nothing in the store could be freed any more."""
    written = [place.write("web") for _ in range(4)]
    for number in (1, 2, 3):
        path = place.path / written[number].object
        data = bytearray(path.read_bytes())
        data[60] ^= 1  # in its head, that tells what it is of
        path.write_bytes(data)
    error = place.json("gc", "--grace", "0", code=8)["error"]
    remedy = re.search(r"criuctl rm ([0-9a-f]{12})$", error["hint"])
    assert remedy is not None and remedy[1] in {one.id[:12] for one in written[1:]}
    place("pin", "web@1")
    removals = place.json("rm", "web", "web@3", written[1].id[:12], "web@1", code=9)
    assert [(r["ok"], r["session"], r["number"]) for r in removals] == [
        (True, "web", 4),
        (True, "web", 3),
        (True, None, 2),
        (False, "web", 1),
    ]
    assert [entry["number"] for entry in place.json("list")] == [1]
    assert place.json("gc", "--grace", "0")["checkpoints"] == 1
    assert place.write("web").number == 5


def test_a_session_without_checkpoints_or_processes_is_forgotten(place: Place) -> None:
    """Else each tree that was ever dumped would be listed as lost for ever; what lives, or can come
    back, is kept.
    """
    registry = Registry(Config(state_dir=place.env["CRIUCTL_STATE_DIR"]))
    me = ProcessIdentity.of(os.getpid())
    for name in ("gone", "pruned", "living", "moved", "elsewhere", "left"):
        pid = me.pid if name == "living" else 1 << 22
        store = "/another" if name == "elsewhere" else str(place.path)
        moved_to = "ssh://there" if name == "moved" else ""
        record = SessionRecord(
            f"rm-{name}",
            pid=pid,
            start_time=me.start_time,
            boot_id=boot_id(),
            store=store,
            moved_to=moved_to,
        )
        registry.put(record)
        place.write(record.name)
    place.write("rm-gone")
    place("rm", "rm-gone@2", "rm-living", "rm-moved", "rm-elsewhere")
    assert {record.name for record in registry.all()} >= {
        "rm-gone",
        "rm-living",
        "rm-moved",
        "rm-elsewhere",
    }
    place("rm", "rm-gone")
    place("prune", "rm-pruned", "--keep-label", "no=such", "--newest-too")
    known = {record.name for record in registry.all() if record.name.startswith("rm-")}
    assert known == {"rm-living", "rm-moved", "rm-elsewhere", "rm-left"}


def test_rm_refuses_what_is_pinned(place: Place) -> None:
    place.write("web", pinned=True)
    assert "(pinned)" in place("list").stdout
    assert place.json("rm", "web", code=9)["error"]["code"] == "conflict"
    assert len(place.json("list")) == 1


def test_a_store_is_made_once(place: Place) -> None:
    made = place.json("store", "init", "--no-encrypt")
    assert (made["encrypted"], made["store"]) == (False, str(place.path))
    assert place.json("store", "init", code=9)["error"]["code"] == "conflict"
    assert place.json("store", "info")["id"] == made["id"]
    assert place.json("store", "key")["key"]["kind"] == "none"
    place("store", "key", "--export", str(place.path.parent / "k"), code=9)


def test_an_encrypted_store_opens_with_its_key_file_only(place: Place, tmp_path: Path) -> None:
    made = place.json("store", "init")
    assert made["encrypted"]
    key = Path(made["key"]["file"])
    assert key.stat().st_mode & 0o777 == 0o600
    found = place.write("web")
    copy = tmp_path / "copy.key"
    assert place.json("store", "key", "--export", str(copy))["exported"] == str(copy)
    assert copy.stat().st_mode & 0o777 == 0o600
    place("store", "key", "--export", str(copy), code=9)
    secret = key.read_text().split()[-1]
    for args in (["store", "key", "-vv"], ["store", "info", "--json"], ["show", "web", "--json"]):
        done = place(*args)
        assert secret not in done.stdout + done.stderr
    key.unlink()
    assert place.json("list", code=7)["error"]["code"] == "key-missing"
    assert place("list", "-q", env={"CRIUCTL_KEY_FILE": str(copy)}).stdout == f"{found.id}\n"
    other = Place(tmp_path / "other", place.run)
    other("store", "init", "--key-file", str(tmp_path / "other.key"))
    place("list", env={"CRIUCTL_KEY_FILE": str(tmp_path / "other.key")}, code=8)


def test_a_store_with_a_passphrase(place: Place, tmp_path: Path) -> None:
    phrase = tmp_path / "phrase"
    phrase.write_text("correct horse battery\n")
    phrase.chmod(0o600)
    config = tmp_path / "config.yaml"
    config.write_text(f"passphrase_file: {phrase}\n")
    done = place("store", "init", "--passphrase", "--config", str(config))
    assert "encrypted with a passphrase" in done.stdout
    assert "opened by the passphrase" in place("store", "info", "--config", str(config)).stdout
    assert "key-missing" in place("list", "--json", code=7).stdout
    phrase.write_text("wrong\n")
    assert "wrong-key" in place("list", "--json", "--config", str(config), code=8).stdout


def test_a_passphrase_is_asked_for_twice_on_a_terminal_and_not_echoed(place: Place) -> None:
    child = pexpect.spawn(
        CRIUCTL[0],
        [*CRIUCTL[1:], "store", "init", "--passphrase"],
        env=clean_environment(**place.env),
        timeout=120,
    )
    child.logfile_read = seen = io.BytesIO()
    try:
        # the space comes when what was typed too early has been dropped
        child.expect("Passphrase of the new store: ")
        child.sendline("s3cret words")
        child.expect("Once more: ")
        child.sendline("s3cret words")
        child.expect(pexpect.EOF)
        assert b"Once more" in seen.getvalue()
        assert b"s3cret" not in seen.getvalue()
        child.wait()
        assert child.exitstatus == 0
    finally:
        child.close(force=True)
    assert (
        "CRIUCTL_PASSPHRASE"
        in place("store", "info", env={"CRIUCTL_PASSPHRASE": "s3cret words"}).stdout
    )


def test_a_store_whose_config_is_gone_is_not_made_again(place: Place) -> None:
    """What is left of it would be lost for good among another store's."""
    made = place.write("web")
    config = place.path / "config"
    kept = config.read_bytes()
    config.unlink()
    assert "Put `config` back" in place.json("list", code=7)["error"]["hint"]
    refused = place.json("store", "init", code=8)["error"]
    assert refused["code"] == "damaged" and "Put `config` back" in refused["hint"]
    assert not config.exists()
    config.write_bytes(kept)
    assert [one["id"] for one in place.json("list")] == [made.id]


def test_no_store_is_7_with_the_way_to_make_one(place: Place) -> None:
    done = place("list", code=7)
    assert "criuctl store init" in done.stderr


def test_refs_complete_with_what_the_store_holds(place: Place) -> None:
    found = [place.write("web"), place.write("web"), place.write("worker")]

    def ask(word: str) -> list[str]:
        env = {
            **place.env,
            "_CRIUCTL_COMPLETE": "bash_complete",
            "COMP_WORDS": f"criuctl show {word}",
            "COMP_CWORD": "2",
        }
        done = place.run(env=env)
        assert done.stderr == ""
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert ask("w") == ["web", "worker"]
    assert ask("web@") == ["web@1", "web@2"]
    assert ask(found[2].id[:6]) == [found[2].id]

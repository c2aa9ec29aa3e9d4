"""``--carry-binaries``: programs and libraries travel, and the other host's own stay as they are,
for everybody else.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hosts_lab.host import Host
from support.hosts import Hosts
from support.keeper import wait_until

pytestmark = pytest.mark.integration

LIBRARY = "/usr/lib/only-a/libnumber.so.1"  # its folder is on A alone
VERSIONED = "/usr/local/lib/libversion.so.1"  # on both, not the same
LIBC = os.path.realpath("/lib/x86_64-linux-gnu/libc.so.6")
PYTHON = "/opt/only-a/bin/python"
# Answers what it and a program that it starts see; `program.py` itself is on both hosts.
PROGRAM = f"""
import ctypes, os, subprocess
number, version = ctypes.CDLL("{LIBRARY}"), ctypes.CDLL("{VERSIONED}")
print("ready", flush=True)
while True:
    asked = input()
    program = "import ctypes; print(ctypes.CDLL('{VERSIONED}').value())"
    again = subprocess.run(
        ["{PYTHON}", "-I", "-S", "-c", program], capture_output=True, text=True
    )
    values = number.value(), version.value()
    print("answer", asked, *values, again.stdout.strip(), again.stderr[-300:], flush=True)
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Shared libraries whose `value` returns the number."""
    folder = tmp_path_factory.mktemp("libraries")
    made = {}
    for number in (1, 2, 7):
        made[number] = folder / f"lib{number}.so"
        source = folder / f"{number}.c"
        source.write_text(
            f"int value(void) {{ return {number}; }}\n"
            + f"char padding{number}[{number << 14}] = {{1}};\n"
        )
        assert (
            os.spawnlp(
                os.P_WAIT, "cc", "cc", "-shared", "-fPIC", "-o", str(made[number]), str(source)
            )
            == 0
        )
    return made


def furnish(host: Host, files: dict[str, Path]) -> None:
    for path, source in files.items():
        host.path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, host.path(path))
        host.path(path).chmod(0o755)
    host.path("/srv").mkdir(exist_ok=True)
    host.path("/srv/program.py").write_text(PROGRAM)


def asked(host: Host, word: str) -> str:
    """What the program answers."""
    offset = host.criuctl("send", "work", "--text", word, "--enter")["offset"]
    answer = host.criuctl(
        "wait", "work", "--match", rf"answer {word} .*\n", "--since", str(offset), "--timeout", "30"
    )
    return str(answer)


@pytest.fixture
def pair(hosts: Hosts, libraries: dict[int, Path]) -> Hosts:
    """A session on A that runs a Python that only A has, with a library that only A has and another
    library that B has in another version.
    """
    a, b = hosts.a, hosts.b
    furnish(
        a,
        {
            LIBRARY: libraries[7],
            VERSIONED: libraries[1],
            PYTHON: Path(os.path.realpath(sys.executable)),
        },
    )
    b.path("/usr/local/lib").mkdir(parents=True, exist_ok=True)
    # on no overlay, as the root of a lab's host is
    b.sh("mount -t tmpfs -o mode=755 none /usr/local/lib")
    furnish(b, {VERSIONED: libraries[2]})
    b.path("/opt").mkdir(exist_ok=True)
    libc = b.path(LIBC)
    longer = libc.with_name("libc.new")
    shutil.copy2(libc, longer)
    with longer.open("ab") as file:
        file.write(b"another build")
    longer.rename(libc)
    a.criuctl("run", "--name", "work", "--detach", "--", PYTHON, "-I", "-S", "/srv/program.py")
    a.criuctl("wait", "work", "--match", "ready", "--timeout", "30")
    return hosts


def with_mounts(host: Host) -> list[int]:
    """Processes of the host that see files that came along."""
    found = []
    for pid in host.processes():
        with suppress(FileNotFoundError, ProcessLookupError, OSError):
            if "criuctl-carried" in Path(f"/proc/{pid}/mountinfo").read_text():
                found.append(pid)
    return found


def assert_untouched(host: Host, libraries: dict[int, Path]) -> None:
    """B's own files are what they were, for everybody but the tree."""
    assert not host.path("/opt/only-a").exists() and not host.path(LIBRARY).parent.exists()
    assert host.path(VERSIONED).read_bytes() == libraries[2].read_bytes()
    assert host.path(LIBC).read_bytes().endswith(b"another build")
    done = host.run(
        [
            "python3.11",
            "-I",
            "-S",
            "-c",
            f"import ctypes; print(ctypes.CDLL('{VERSIONED}').value())",
        ]
    )
    assert done.stdout == "2\n"


def test_there_and_back(pair: Hosts, libraries: dict[int, Path]) -> None:
    """The tree and what it starts see A's files on B, which dumps it and has it back, and so to
    A.
    """
    a, b = pair.a, pair.b
    a.criuctl("migrate", "work", b.ssh_url, "--carry-binaries")
    assert "answer there 7 1 1" in asked(b, "there")
    assert with_mounts(b)
    assert_untouched(b, libraries)
    upgraded = b.path(VERSIONED).with_name("new")  # B's package of it is upgraded meanwhile
    shutil.copy2(b.path(VERSIONED), upgraded)
    upgraded.rename(b.path(VERSIONED))
    assert "answer still 7 1 1" in asked(b, "still")
    b.criuctl("dump", "work")
    assert with_mounts(b) == []
    b.criuctl("restore", "work")
    assert "answer again 7 1 1" in asked(b, "again")
    assert_untouched(b, libraries)
    b.criuctl("migrate", "work", a.ssh_url)
    assert "answer home 7 1 1" in asked(a, "home")
    assert with_mounts(a) == [] == with_mounts(b)


def test_by_a_store(pair: Hosts, libraries: dict[int, Path]) -> None:
    """In two steps: the plan tells, a restore that fails leaves nothing, and nor does one whose
    tree has ended.
    """
    a, b = pair.a, pair.b
    a.criuctl("dump", "work", "--carry-binaries")
    for folder in ("/var/lib/criuctl", "/etc/criuctl/keys"):
        shutil.copytree(a.path(folder), b.path(folder), dirs_exist_ok=True)
    plan = b.criuctl("restore", "work", "--dry-run")
    overlaid = {file["path"] for file in plan["files"] if file["verdict"] == "overlaid"}
    assert overlaid == {PYTHON, LIBRARY, VERSIONED, LIBC} and plan["pids"] == "private"
    hook = b.path("/etc/criuctl/hooks/post-restore/50-refuse")
    hook.parent.mkdir(parents=True)
    hook.write_text("#!/bin/sh\nexit 10\n")
    hook.chmod(0o755)
    assert b.criuctl("restore", "work", check=False)["exit_code"] == 10
    assert with_mounts(b) == []
    hook.unlink()
    b.criuctl("restore", "work")
    assert "answer here 7 1 1" in asked(b, "here")
    b.criuctl("kill", "work")
    wait_until(lambda: with_mounts(b) == [], 30, "the mounts have gone with the tree")
    assert_untouched(b, libraries)

"""Test whether a CRIU really works on this kernel; standard library only, run as root by
scripts/setup.

    probe_criu.py CRIU [ARGUMENT...]        exit 0: works; 3: does not, and one line on stdout gives
                                            the reason

A version number proves nothing: Debian 12's CRIU cannot start on a recent kernel, and Debian 13's
passes `criu check` but cannot dump a TCP socket there.  So both are done here: `criu check`, then a
dump of a small process that holds both ends of an established loopback connection, left running.
All of it happens in a separate network namespace, so that no firewall rule of CRIU's can outlive
it.  The images are on tmpfs, because they hold memory; they and the process are removed at the end.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

IN_NAMESPACE = "--in-namespace"
TIMEOUT = 60
LAST = signal.SIGUSR1  # ends the dumped process; CRIU would use another signal
DOES_NOT_WORK = 3
# errors that CRIU reports but tolerates
HARMLESS = ("RLIMIT_NOFILE", "Unable to create tun", "exited, status")
IFF_UP = 1
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914

VICTIM = """
import os, select, socket
listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far, _ = listener.accept()
near.sendall(b"queued")
os.write(1, b"ready\\n")
null = os.open("/dev/null", os.O_RDWR)
os.dup2(null, 1)
os.close(null)
select.select([], [], [])
"""


class DoesNotWork(Exception):
    """The reason, as one line."""


def tmpfs_folder() -> Path:
    """Return a new private folder, on tmpfs where there is one."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    tmpfs = {
        fields[1] for fields in mounts if fields[2] == "tmpfs" and "rw" in fields[3].split(",")
    }
    place = next((place for place in ("/dev/shm", "/run") if place in tmpfs), None)
    return Path(tempfile.mkdtemp(prefix="criuctl-probe-", dir=place))


def loopback_up() -> None:
    """Bring up lo, which is down in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        (flags,) = struct.unpack_from(
            "H", fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0)), 16
        )
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def first_error(text: str) -> str:
    """Return CRIU's first line about an error that matters, or its last line."""
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not any(word in line for word in HARMLESS)
    ]
    return next(
        (line for line in lines if "Error" in line), lines[-1] if lines else "it said nothing"
    )


def criu(argv: list[str], *arguments: str, log: Path | None = None) -> None:
    """Run CRIU with `arguments`; raise `DoesNotWork` with its first error when it fails."""
    try:
        done = subprocess.run(
            [*argv, "--no-default-config", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise DoesNotWork(f"cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise DoesNotWork(f"`criu {arguments[0]}` did not end within {TIMEOUT} s") from error
    if done.returncode != 0:
        text = log.read_text(errors="replace") if log is not None and log.exists() else done.stdout
        raise DoesNotWork(f"`criu {arguments[0]}` fails: {first_error(text)}")


def dump_a_connection(argv: list[str]) -> None:
    """Dump a process with an established loopback connection and leave it running; clean up both
    afterwards.
    """
    images = tmpfs_folder()
    victim = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", VICTIM],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    try:
        assert victim.stdout is not None
        if (
            not select.select([victim.stdout], [], [], TIMEOUT)[0]
            or victim.stdout.readline() != b"ready\n"
        ):
            raise DoesNotWork(
                "the process to be dumped did not come up (is the loopback interface usable?)"
            )
        victim.stdout.close()
        arguments = [
            "dump",
            "--tree",
            str(victim.pid),
            "--images-dir",
            str(images),
            "--log-file",
            "dump.log",
            "-v2",
        ]
        criu(
            argv,
            *arguments,
            "--tcp-established",
            "--network-lock",
            "nftables",
            "--leave-running",
            log=images / "dump.log",
        )
        # a process that CRIU killed ended by another signal, and a stopped one does not end
        victim.send_signal(LAST)
        try:
            survived = victim.wait(TIMEOUT) == -LAST
        except subprocess.TimeoutExpired:
            survived = False
        if not survived:
            raise DoesNotWork(
                "the dumped process did not survive a dump that was to leave it running"
            )
    finally:
        victim.kill()
        victim.wait()
        shutil.rmtree(images)


def main(argv: list[str]) -> int:
    """Probe the CRIU that `argv` starts; return the exit code and print the reason."""
    if argv[:1] != [IN_NAMESPACE]:
        # The first pass: run this program again in a new network namespace, so that nothing
        # can leak.
        os.execvp("unshare", ["unshare", "--net", sys.executable, __file__, IN_NAMESPACE, *argv])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    loopback_up()
    try:
        criu(argv[1:], "check")
        dump_a_connection(argv[1:])
    except DoesNotWork as reason:
        print(reason)
        return DOES_NOT_WORK
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

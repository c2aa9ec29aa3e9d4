"""This host as a reboot leaves it: what lies in memory is gone, the boot id and the uptime are
others, PIDs begin again.

Mount, PID and time namespaces whose first process reaps what ends in them.  /tmp, /run and /dev/shm
are empty but for the test's own folder (its "disk", with the store and criuctl's state), and the
checkout and its Python where these lie there.  `prefix`
runs a program there.  All of it ends with `close`.
"""

from __future__ import annotations

import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from . import oracle
from .command import PROJECT, Home
from .keeper import Keeper, wait_until

_TIMEOUT = 60.0
_SPACES = ("mount", "pid", "time")
_BOOT = """
set -e
mount -t tmpfs tmpfs /mnt
set -- {kept}
count=0
for folder; do
    count=$((count + 1))
    mkdir /mnt/$count
    mount --rbind "$folder" /mnt/$count
done
for folder in /tmp /run /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
mkdir -m 700 {disk} {run}
count=0
for folder; do
    count=$((count + 1))
    mkdir -p "$folder"
    mount --move /mnt/$count "$folder"
done
umount /mnt
mount -t proc proc /proc
mount --bind {disk}/{name}.id /proc/sys/kernel/random/boot_id
for pid in {taken}; do
    echo $((pid - 1)) >/proc/sys/kernel/ns_last_pid
    sleep 100000 </dev/null >/dev/null 2>&1 &
done
touch {disk}/{name}.up
exec {python} -S -c '
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)'
"""


def _is_fleeting(folder: Path) -> bool:
    """Whether a reboot would empty the place where the folder is."""
    return any(folder.is_relative_to(place) for place in ("/tmp", "/run", "/dev/shm"))


class Rebooted:
    """One simulated boot; `taken` are PIDs that other processes have by then, `later` the seconds
    that its clocks are ahead.
    """

    def __init__(
        self, keeper: Keeper, home: Home, taken: Sequence[int] = (), later: int = 1_000_000
    ) -> None:
        name = f"boot-{uuid.uuid4().hex[:6]}"
        (home.path / f"{name}.id").write_text(f"{uuid.uuid4()}\n")
        script = home.path / f"{name}.sh"
        numbers = " ".join(map(str, taken))
        kept = [home.path, *filter(_is_fleeting, (PROJECT, Path(sys.prefix)))]
        if PROJECT in Path(sys.prefix).parents:
            kept = [folder for folder in kept if folder != Path(sys.prefix)]
        script.write_text(
            _BOOT.format(
                disk=home.path,
                run=home.run,
                name=name,
                taken=numbers,
                python=shlex.quote(sys.executable),
                kept=shlex.join(map(str, kept)),
            )
        )
        clocks = ["--time", f"--monotonic={later}", f"--boottime={later}"]
        spaces = ["--mount", "--propagation=private", "--pid", "--fork", "--kill-child", *clocks]
        log = home.path / f"{name}.log"
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "CZOO_TOKEN": home.token}
        with log.open("wb") as out:
            self._outer = keeper.spawn(
                ["unshare", *spaces, "sh", str(script)], env=environment, stdout=out, stderr=out
            )
        wait_until(
            lambda: (home.path / f"{name}.up").exists() or self._outer.poll() is not None,
            _TIMEOUT,
            "the boot",
        )
        assert self._outer.alive(), log.read_text(errors="replace")
        (first,) = oracle.tree(self._outer.pid)[1:2]
        self.prefix = ["nsenter", f"--target={first}", *(f"--{space}" for space in _SPACES), "--"]

    def inner(self, pid: int) -> int:
        """How a process there, of this PID here, is called there."""
        numbers = oracle.status_of(f"/proc/{pid}/status").get("NSpid", "").split()
        outside = len(oracle.status_of("/proc/self/status")["NSpid"].split())
        return int(numbers[outside]) if numbers[outside:] else 0

    def outer(self, pid: int) -> int:
        """The PID here of the process that is called so there."""
        found = [one for one in oracle.tree(self._outer.pid)[1:] if self.inner(one) == pid]
        assert found, f"there is no process {pid} there"
        return found[0]

    def close(self) -> None:
        """End all of it."""
        self._outer.kill()
        self._outer.wait(_TIMEOUT)

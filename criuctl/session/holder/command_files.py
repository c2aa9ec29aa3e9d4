"""The files of a command that runs next to the terminal, and the environment that it gets.

Each of standard output, standard error and the exit code is a memory file that the command's
process has open (`proc.commandchild`).  The holder holds them open too, and frees the beginning of
one that grows: its size and the offsets in it stay.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ...proc.tree import ProcessIdentity

STREAMS = ("stdout", "stderr")
_PUNCH, _PAGE = 0x2 | 0x1, 4096  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_HOOKS = "CRIUCTL_SHELL"  # what `launch.shell_hooks` adds to an environment begins so
_HOOKED = ("PS1", "PS2", "ENV", "ZDOTDIR", "PROMPT_COMMAND")


@dataclass
class Files:
    """The files of one command, and its process while it runs."""

    out: int
    err: int
    code: int
    process: ProcessIdentity | None = None
    pidfd: int = -1
    base: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))

    def of(self, stream: str) -> int:
        """Return the descriptor of a stream."""
        return self.out if stream == "stdout" else self.err

    def size(self, stream: str) -> int:
        """Return how many bytes were written to a stream."""
        return os.fstat(self.of(stream)).st_size

    def free(self, stream: str, kept: int) -> None:
        """Free all but the newest bytes of a stream, by whole pages."""
        base = (self.size(stream) - kept) // _PAGE * _PAGE
        if base > self.base[stream]:
            import ctypes  # large, and seldom needed

            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate(self.of(stream), _PUNCH, ctypes.c_long(0), ctypes.c_long(base))
            self.base[stream] = base

    def close(self) -> None:
        """Close the files."""
        for fd in (self.out, self.err, self.code):
            os.close(fd)


def open_files(process: ProcessIdentity, name: str) -> Files | None:
    """Open the files of the command `name` that this process waits for; None: it does not."""
    folder = f"/proc/{process.pid}/fd"
    found: dict[str, str] = {}
    try:
        for number in os.listdir(folder):
            link = os.readlink(f"{folder}/{number}")
            for kind in ("out", "err", "code"):
                if link.startswith(f"/memfd:{name}-{kind}"):
                    found[kind] = f"{folder}/{number}"
        out, err, code = (
            os.open(found[kind], os.O_RDWR | os.O_CLOEXEC) for kind in ("out", "err", "code")
        )
    except (OSError, KeyError):
        return None
    files = Files(out, err, code, process=process)
    for stream in STREAMS:
        files.base[stream] = _first_data(files.of(stream))
    return files


def _first_data(fd: int) -> int:
    """Return the offset of the first byte of a file that is not in a hole."""
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except OSError:  # it is empty, or all of it was freed
        return os.fstat(fd).st_size


def without_hooks(env: dict[str, str]) -> dict[str, str]:
    """Return an environment as it was before hooks were added for a shell."""
    if _HOOKS not in env:
        return env
    kept = {name: value for name, value in env.items() if not name.startswith(_HOOKS)}
    for name in _HOOKED:
        if f"{_HOOKS}_{name}" in env:
            kept[name] = env[f"{_HOOKS}_{name}"]
        elif name in kept and f"{_HOOKS}_DIR" in env:
            if env[f"{_HOOKS}_DIR"] in kept[name] or f"${_HOOKS}_DIR" in kept[name]:
                del kept[name]
    return kept

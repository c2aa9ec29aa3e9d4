"""The text of a key file, and the files that hold a secret.

A key file holds the 32 random bytes that open a slot of a store's config (`key_slots`), an exported
master key, or a recovery key as it is typed (`recovery`); `KeyText` is that content. The first line
says which. The key of a write-only host is another kind of file (`writer_keys`).

A file with a secret is made for its owner alone, durable before it is used. A file that other users
can read or write is refused: `read_secret` is the only way in which one is read. No error text
repeats any of the content.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import secrets
import stat
from pathlib import Path

from ..errors import KeyMissing, UnsupportedFormat, WrongKey
from ..proc.folders import make_private
from ..quoting import quoted
from . import recovery
from .codec import KEY_SIZE
from .records import Confidential

_KEY_LINE = "criuctl key 1"
WRITER_LINE = "criuctl writer key "
_MASTER_LINE = "criuctl master key 1"
MAX_SECRET_FILE = 4096
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


class KeyText(Confidential, frozen=True):
    """The content of a key file: the secret that opens a slot, or an exported master key."""

    key: bytes
    master: bool = False
    recovery: bool = False

    @property
    def slot(self) -> str:
        """The kind of slot that the key opens: file or recovery; "master" for a master key, which
        needs none.
        """
        return "master" if self.master else "recovery" if self.recovery else "file"

    def text(self) -> str:
        """Return the file's content."""
        if self.recovery:
            return recovery.to_text(self.key) + "\n"
        line = _MASTER_LINE if self.master else _KEY_LINE
        return f"{line}\n{base64.b64encode(self.key).decode()}\n"

    @classmethod
    def parse(cls, text: bytes, where: str) -> KeyText:
        """Parse a key file's content; raise `WrongKey` if it is not one."""
        lines = text.decode("ascii", "replace").split("\n")
        if lines[0].startswith(WRITER_LINE):
            raise WrongKey(
                f"{where} is the key of a write-only host, which cannot read what is stored",
                hint="Name another key file: this needs one that opens the store.",
            )
        if lines[0] not in (_KEY_LINE, _MASTER_LINE):
            if lines[0].startswith(("criuctl key ", "criuctl master key ")):
                raise UnsupportedFormat(f"{where} is a key file of a newer criuctl: {lines[0]}")
            if recovery.looks_like(typed := text.decode("utf-8", "replace")):
                return cls(recovery.from_text(typed, where), recovery=True)
            raise WrongKey(
                f"{where} is no key file of criuctl", hint=f"Its first line must be {_KEY_LINE!r}."
            )
        try:
            key = base64.b64decode(lines[1], validate=True)
        except (IndexError, binascii.Error):
            key = b""
        if len(key) != KEY_SIZE or any(lines[2:]):
            raise WrongKey(f"{where} is a damaged key file", hint="Bring a copy of it back.")
        return cls(key, lines[0] == _MASTER_LINE)


def new_key_file(path: Path) -> tuple[KeyText, bool]:
    """Make a key file, 0600 in a 0700 folder, durable; an existing one is read and used as it is.

    Return the key, and whether this call has made the file: of several processes exactly one has.
    """
    key = KeyText(secrets.token_bytes(KEY_SIZE))
    try:
        write_secret(path, key.text())
    except FileExistsError:
        return KeyText.parse(read_secret(path), str(path)), False
    return key, True


def write_secret(path: Path, text: str) -> None:
    """Write a new file that only its owner can read; raise `FileExistsError`.

    The file gets its name when it is complete and durable: another process that finds it can read
    it at once, and one that is killed leaves nothing.
    """
    try:
        if not path.parent.exists():  # otherwise the operator chose this folder: leave its mode
            make_private(path.parent)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _write_new(folder, path.name, text)
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        raise
    except OSError as error:
        raise KeyMissing(
            f"the key file {path} cannot be written: {error.strerror}",
            hint=f"{'Run criuctl as root, or name' if os.geteuid() else 'Name'} another place: "
            "--key-file, or key_dir in the configuration (CRIUCTL_KEY_DIR).",
        ) from error


def _write_new(folder: int, name: str, text: str) -> None:
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        fd = -1
    if fd >= 0:
        try:
            _write_all(fd, text)
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)
            return
        finally:
            os.close(fd)
    # the file system of a USB stick, for example
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        _write_all(fd, text)
    except OSError:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, text: str) -> None:
    with open(fd, "w", closefd=False) as file:
        file.write(text)
    os.fsync(fd)


def read_secret(path: Path) -> bytes:
    """Return the content of a small file that only this user can read; raise `KeyMissing`, which
    says what is wrong.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise KeyMissing(f"{path} is no regular file", hint="Name the key file itself.")
        with os.fdopen(fd, "rb") as file:
            if found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
                raise KeyMissing(
                    f"{path} is not used: others than its owner may read or change it",
                    hint=f"`chmod 600 {quoted(path)}`, and find out which users have read it.",
                )
            return file.read(MAX_SECRET_FILE)
    except OSError as error:
        raise KeyMissing(
            f"{path} cannot be read: {error.strerror}",
            hint="Run criuctl as root, or name another file."
            if isinstance(error, PermissionError)
            else "Bring the file back, or name another one.",
        ) from error

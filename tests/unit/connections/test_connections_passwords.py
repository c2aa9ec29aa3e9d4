"""The password file of a program whose connection is given back: read with our rights, and only if
it is its own.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support.obstacles import running

from criuctl.connections.protocols.postgresql import _uid
from criuctl.connections.protocols.postgresql_auth import PasswordFile, from_password_file

BOB = 12345


@pytest.mark.parametrize(
    ("owner", "program", "found"),
    [
        (BOB, BOB, "secret"),
        (0, BOB, None),
        (BOB, 0, "secret"),
        (0, 0, "secret"),
        (BOB, BOB + 1, None),
        (0, None, "secret"),
    ],
)
def test_whose_file_it_is(
    owner: int, program: int | None, found: str | None, tmp_path: Path
) -> None:
    """A program names any path in its environment, and the server that it is connected to may be
    its own.
    """
    file = tmp_path / "passwords"
    file.write_text("db:5432:*:bob:secret\n")
    file.chmod(0o600)
    os.chown(file, owner, owner)
    warnings: list[str] = []
    assert (
        from_password_file(
            PasswordFile(str(file), ("db",), 5432, program), "stock", "bob", warnings
        )
        == found
    )
    assert bool(warnings) == (found is None)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "passwords", 0o600)
    warnings: list[str] = []
    assert (
        from_password_file(
            PasswordFile(str(tmp_path / "passwords"), ("db",), 5432), "stock", "bob", warnings
        )
        is None
    )
    assert "not a regular file" in warnings[0]


def test_what_is_no_file_is_not_even_opened(tmp_path: Path) -> None:
    """To open a watchdog's device, say, has the host restart unless it is closed in its own way; of
    a FIFO one can see it.
    """
    fifo = tmp_path / "passwords"
    os.mkfifo(fifo, 0o600)
    writing = threading.Thread(target=lambda: os.close(os.open(fifo, os.O_WRONLY)), daemon=True)
    writing.start()  # ends once the FIFO is opened to read
    for _ in range(25):
        from_password_file(PasswordFile(str(fifo), ("db",), 5432), "stock", "bob", [])
        writing.join(0.02)
    assert writing.is_alive()
    os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))
    writing.join(60)


@pytest.mark.parametrize(("maker", "found"), [(BOB, "secret"), (0, "secret"), (BOB + 1, None)])
def test_a_link_on_the_way(maker: int, found: str | None, tmp_path: Path) -> None:
    """The program's user may have one; no other user leads root anywhere."""
    file, link = tmp_path / "passwords", tmp_path / "link"
    file.write_text("db:5432:*:bob:secret\n")
    file.chmod(0o600)
    link.symlink_to(file)
    os.chown(file, BOB, BOB)
    os.chown(link, maker, maker, follow_symlinks=False)
    warnings: list[str] = []
    asked = PasswordFile(str(link), ("db",), 5432, BOB)
    assert from_password_file(asked, "stock", "bob", warnings) == found
    assert bool(warnings) == (found is None)


def test_the_user_of_a_program_that_has_changed_it(tmp_path: Path) -> None:
    """Its folder in /proc is root's then."""
    with running(f"os.setuid({BOB})", tmp_path) as program:
        assert _uid(program.pid) == BOB

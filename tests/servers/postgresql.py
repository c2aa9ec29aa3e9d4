"""A real PostgreSQL server from Debian's package: own folder, own port, no service.

It listens on 127.0.0.1 and ::1 and on a unix socket in its folder.  Which way a user logs in is the
user's name: roles ``trust``, ``clear``, ``md5`` and ``scram`` (password: the name and ``-secret``),
all of them superusers, so that a test can be about anything; the database is ``postgres``.  initdb
runs once per test session; the data is small and not synced.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .common import ServerFailed, free_ports, need, tool

_HBA = """
local all clear password
local all md5 md5
local all scram scram-sha-256
local all all trust
"""
_ROLES = """
CREATE ROLE clear LOGIN SUPERUSER PASSWORD 'clear-secret';
SET password_encryption = 'md5';
CREATE ROLE md5 LOGIN SUPERUSER PASSWORD 'md5-secret';
SET password_encryption = 'scram-sha-256';
CREATE ROLE scram LOGIN SUPERUSER PASSWORD 'scram-secret';
CREATE ROLE plain LOGIN;
"""
_PASSWORDS = {"clear": "clear-secret", "md5": "md5-secret", "scram": "scram-secret"}


_PRELOADED = """
#include <sys/types.h>
uid_t getuid(void) { return USER; }
uid_t geteuid(void) { return USER; }
"""


def taking_root_for_its_user(folder: Path) -> Path:
    """Make a library with which a server (LD_PRELOAD) takes root for its own user: processes of
    other users are not dumped on every machine of the tests.
    """
    source, library = folder / "user.c", folder / "user.so"
    source.write_text(_PRELOADED)
    user = f"-DUSER={pwd.getpwnam('postgres').pw_uid}"
    argv = ["gcc", "-shared", "-fPIC", user, "-o", str(library), str(source)]
    subprocess.run(argv, check=True, timeout=60)
    return library


def binary(name: str) -> str:
    """The path of a program of the newest PostgreSQL here."""
    newest = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0,
    )
    return need(str(newest[-1] / name) if newest else name, "postgresql")


class PostgresServer:
    """A running server; see the module's docstring."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(1)[0]
        self.data = folder / "data"
        owner = pwd.getpwnam("postgres")
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        # PostgreSQL refuses root; setpriv also ends the server should the tests be killed.
        self._as_postgres = [
            "setpriv",
            f"--reuid={owner.pw_uid}",
            f"--regid={owner.pw_gid}",
            "--clear-groups",
        ]
        self._env = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(folder)}
        self._process: subprocess.Popen[bytes] | None = None

    def initialise(self) -> None:
        initdb = [
            binary("initdb"),
            "-D",
            str(self.data),
            "-U",
            "trust",
            "-A",
            "trust",
            "-N",
            "-E",
            "UTF8",
            "--no-instructions",
        ]
        tool([*self._as_postgres, *initdb], self._env)
        local = [line for line in _HBA.split("\n") if line]
        hosts = [line.replace("local all", "host all", 1).split(" ") for line in local]
        lines = local + [
            " ".join([*w[:3], address, *w[3:]])
            for w in hosts
            for address in ("127.0.0.1/32", "::1/128")
        ]
        (self.data / "pg_hba.conf").write_text("\n".join(lines) + "\n")
        self.start()
        self.execute(_ROLES)

    def start(self, *options: str) -> None:
        """Start (again) on the same port and data; `options` are settings, ``name=value``."""
        settings = [
            f"port={self.port}", "listen_addresses=127.0.0.1,::1",
            f"unix_socket_directories={self.folder}", "fsync=off", "shared_buffers=16MB",
            "max_connections=100", "autovacuum=off", "logging_collector=off", *options,
        ]  # fmt: skip
        flags = [word for setting in settings for word in ("-c", setting)]
        argv = [
            *self._as_postgres,
            "--pdeathsig",
            "INT",
            binary("postgres"),
            "-D",
            str(self.data),
            *flags,
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_ready()

    def _wait_ready(self) -> None:
        import psycopg

        deadline = time.monotonic() + 60
        while True:
            try:
                self.connect(connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise ServerFailed(
                        f"postgres did not come up: {error}: {self.log_tail()}"
                    ) from error
                # between questions to another process, which has no way to call us
                time.sleep(0.02)

    def stop(self, how: int = signal.SIGINT) -> None:
        """End it; SIGINT is the fast shutdown, sessions are ended; SIGQUIT is as a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait(30)
            self._process = None

    def restart(self, *options: str) -> None:
        """All sessions end, the data stays."""
        self.stop()
        self.start(*options)

    def connect(self, user: str = "trust", host: str = "127.0.0.1", **options: Any) -> Any:
        """A psycopg connection in autocommit mode; `host` "unix" is the socket file."""
        import psycopg

        where = str(self.folder) if host == "unix" else host
        known = {
            "host": where,
            "port": self.port,
            "user": user,
            "dbname": "postgres",
            "password": _PASSWORDS.get(user),
        }
        return psycopg.connect(**{"autocommit": True, **known, **options})

    def execute(self, statements: str) -> list[Any]:
        """Run statements in a session of their own; the rows of the last."""
        with self.connect() as connection:
            cursor = connection.execute(statements)
            while cursor.nextset():
                pass
            return list(cursor.fetchall()) if cursor.description else []

    def enable_tls(self) -> None:
        """A certificate of its own; takes effect with the next start with ``ssl=on``."""
        if (self.data / "server.key").exists():
            return
        openssl = [
            need("openssl", "openssl"),
            "req", "-new", "-x509", "-days", "2", "-nodes", "-newkey", "rsa:2048",
            "-subj", "/CN=localhost", "-out", str(self.data / "server.crt"),
            "-keyout", str(self.data / "server.key"),
        ]  # fmt: skip
        tool([*self._as_postgres, *openssl], self._env)
        os.chmod(self.data / "server.key", 0o600)

    def log_tail(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]


@contextmanager
def postgresql() -> Iterator[PostgresServer]:
    """A server with an empty database; it and its folder are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    server = PostgresServer(folder)
    try:
        server.initialise()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)

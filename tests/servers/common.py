"""What the servers share: child processes that end with us, free ports, and an S3 server's
coordinates.
"""

from __future__ import annotations

import errno
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0
_STOP_SECONDS = 30.0


class ServerFailed(Exception):
    """A server did not come up, or a tool of it failed; the message holds the end of its log."""


class Daemon:
    """One child process with its log; it cannot outlive the process that started it."""

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # a ^C in the test's terminal is not for it
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], seconds: float = _START_SECONDS) -> None:
        """Ask `ready` until it says yes; `ServerFailed` if the process ends or the time is over."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self._process.poll() is not None:
                raise ServerFailed(
                    f"{self.name} ended with {self._process.returncode}: {self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self.name} did not come up in {seconds:.0f} s: {self.log_tail()}"
                )
            time.sleep(0.05)  # between questions to another process, which has no way to call us

    def kill(self) -> None:
        """kill -9, as a crash would."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop answering without closing a connection (SIGSTOP)."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it in order, or by force if it does not go."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


@dataclass
class S3Server:
    """Where a server is and how to get in."""

    endpoint: str
    access_key: str
    secret_key: str
    folder: Path
    region: str = "us-east-1"
    buckets: set[str] = field(default_factory=set)  # those that were made here

    @property
    def env(self) -> dict[str, str]:
        """The environment variables with which boto3 finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def client(self) -> Any:
        """A plain boto3 client, to look at the server past criuctl; always the same one."""
        return self._client

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def make_bucket(self, name: str) -> None:
        """Make the bucket, unless it is there."""
        if name not in self.buckets:
            self.client().create_bucket(Bucket=name)
            self.buckets.add(name)

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Every key of the bucket that begins with `prefix`."""
        pages = (
            self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        )
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def multipart_uploads(self, bucket: str) -> list[str]:
        """The keys of multipart uploads that were begun and neither completed nor aborted."""
        from botocore.exceptions import ClientError

        try:
            return [
                upload["Key"]
                for upload in self.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])
            ]
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchUpload":  # rclone's word for none
                return []
            raise


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 and ::1 that were free a moment ago.

    They are below the range that the kernel picks from for clients: no client gets one by chance,
    before its server listens or while that is stopped and started again.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = 10_000 if ephemeral > 12_000 else 1_024
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(first, max(ephemeral, first + 2_000))
        if port not in found and not _taken(port):
            found.append(port)
    return found


def _taken(port: int) -> bool:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as sock:
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def accepts(port: int) -> bool:
    """Whether a server listens on that port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def need(program: str, install: str) -> str:
    """The path of a program, or `ServerFailed` saying what to install: a test is never skipped in
    silence.
    """
    found = shutil.which(program)
    if found is None:
        raise ServerFailed(f"{program} is missing; install {install} (scripts/setup does)")
    return found


def tool(argv: Sequence[str], env: Mapping[str, str], seconds: float = _START_SECONDS) -> str:
    """Run a server's tool to its end; its output, or `ServerFailed` with what it said."""
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerFailed(f"{' '.join(argv)}: not done after {seconds:.0f} s") from error
    if done.returncode:
        raise ServerFailed(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout

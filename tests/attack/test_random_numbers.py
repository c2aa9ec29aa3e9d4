"""One copy of a session tells nothing of the random numbers of another: a peer that sees the
numbers of one cannot predict the keys, identifiers and cookies of its sisters.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from servers.common import free_ports
from servers.postgresql import binary
from support.asking import Asked
from support.command import PROJECT
from support.keeper import wait_until
from support.operating import TIMEOUT

pytestmark = pytest.mark.integration


class Lives:
    """Each life of a session's program that waits for its generation number, and then shows what
    it has.
    """

    def __init__(self, asked: Asked, program: str, *arguments: str, workspace: Path) -> None:
        self.folder = asked.home.path / "lives"
        self.folder.mkdir()
        path = PROJECT / "tests" / "integration" / "programs" / program
        options = ("-d", "--name", "work", "--workspace", workspace)
        asked("run", *options, "--", sys.executable, path, self.folder, *arguments)

    def shown(self, count: int) -> Sequence[dict[str, Any]]:
        """What the lives have shown, when so many have."""
        wait_until(lambda: len(self._files()) >= count, 2 * TIMEOUT, f"{count} lives")
        return [json.loads(file.read_text()) for file in self._files()]

    def _files(self) -> list[Path]:
        return [file for file in self.folder.iterdir() if not file.name.startswith(".")]


def test_python(asked: Asked) -> None:
    """Twenty copies of a live session, and two restores of one checkpoint, one of them lazy."""
    lives = Lives(asked, "own_generators.py", workspace=asked.home.path)
    lives.shown(1)
    asked("fork", "work", "-n", 20)
    checkpoint = asked("dump", "work")["checkpoint"]
    asked("restore", checkpoint)
    asked("restore", checkpoint, "--as", "other", "--lazy")
    shown = lives.shown(23)
    for key in ("openssl", "key", "random", "kernel", "generation"):
        assert len({one[key] for one in shown}) == 23
    assert [one["wiped"] for one in shown].count(False) == 1


_NODE = """
const { randomBytes } = require("crypto");
const lines = require("readline").createInterface({ input: process.stdin });
lines.on("line", () => console.log(randomBytes(16).toString("hex")));
"""

_JAVA = """
public class Generator {
  public static void main(String[] arguments) throws Exception {
    var random = new java.security.SecureRandom();
    var lines = new java.io.BufferedReader(new java.io.InputStreamReader(System.in));
    while (lines.readLine() != null) System.out.println(random.nextLong());
  }
}
"""

_NGINX = """
user root; worker_processes 1; daemon off; error_log stderr; pid {folder}/nginx.pid;
events {{}}
http {{
  access_log off; ssl_certificate {folder}/cert; ssl_certificate_key {folder}/key;
  server {{ listen 127.0.0.1:{port} ssl; }}
}}
"""

# PostgreSQL refuses root, and processes of other users are not dumped on every machine of the tests
_USER = "int getuid(void) {{ return {0}; }}\nint geteuid(void) {{ return {0}; }}\n"

_CERTIFICATE = (
    "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -days 2"
)


def _generators(folder: Path) -> dict[str, Any]:
    """Set the programs up in a folder; return what is to be started."""
    (folder / "Generator.java").write_text(_JAVA)
    (folder / "generator.js").write_text(_NODE)
    user = pwd.getpwnam("postgres").pw_uid
    (folder / "user.c").write_text(_USER.format(user))
    (folder / "data").mkdir(mode=0o700)
    os.chown(folder / "data", user, -1)
    nginx, sshd, postgres = free_ports(3)
    (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, port=nginx))
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    as_user = ["env", f"LD_PRELOAD={folder}/user.so", "LC_ALL=C.UTF-8"]
    tools: list[list[str | Path]] = [
        ["javac", folder / "Generator.java"],
        ["openssl", *_CERTIFICATE.split(), "-keyout", folder / "key", "-out", folder / "cert"],
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host"],
        ["gcc", "-shared", "-fPIC", "-o", folder / "user.so", folder / "user.c"],
        [*as_user, binary("initdb"), "-D", folder / "data", "-U", "u", "-A", "trust", "-N"],
    ]
    for argv in tools:
        subprocess.run(argv, check=True, timeout=120, stdin=subprocess.DEVNULL)
    options = f"-D {folder}/data -k {folder} -p {postgres} -c listen_addresses= -F -B 16MB"
    return {
        "piped": {
            "node": ["node", str(folder / "generator.js")],
            "java": ["java", "-Xmx64m", "-XX:+UseSerialGC", "-cp", str(folder), "Generator"],
        },
        "servers": [
            ["nginx", "-c", f"{folder}/nginx.conf"],
            ["/usr/sbin/sshd", *f"-D -e -f /dev/null -h {folder}/host -p {sshd}".split()],
            [*as_user, binary("postgres"), *options.split()],
        ],
        "nginx": nginx,
        "sshd": sshd,
        "postgres": f"host={folder} port={postgres} user=u dbname=postgres",
    }


def test_other_programs(asked: Asked) -> None:
    """Node.js, Java, nginx, OpenSSH and PostgreSQL, in three copies."""
    work = asked.home.path / "work"
    work.mkdir()
    lives = Lives(asked, "generators.py", json.dumps(_generators(work)), workspace=work)
    lives.shown(1)
    asked("fork", "work", "-n", 3, "--fork-workspace")
    shown = lives.shown(4)
    for name in ("node", "java", "nginx", "sshd", "postgres"):
        assert len({one[name] for one in shown}) == 4


_OPENSSL = "__import__('ssl').RAND_bytes(8).hex()"


def test_a_copy_of_a_copy(asked: Asked) -> None:
    """Whose generator nothing has used since it was copied itself."""
    asked.begin("work")
    asked.ask("work", _OPENSSL)
    asked("fork", "work", "--as", "copy")
    asked("fork", "copy", "-n", 2)
    names = ["work", "copy", "copy-1", "copy-2"]
    assert len({asked.ask(name, _OPENSSL) for name in names}) == len(names)

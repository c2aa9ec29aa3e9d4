"""A server that acknowledges a write and has stored something else of the same size: no checkpoint
relies on it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from servers import FaultProxy, RcloneServer
from support.aftermath import Aftermath
from support.command import Criuctl, Home
from support.zoo import Zoo

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize("what", ["packs", "checkpoints"])
@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["ends", "left running"])
@pytest.mark.parametrize("says", ["what it has stored", "what was sent"])
def test_a_server_that_changes_a_byte(
    says: str,
    options: tuple[str, ...],
    what: str,
    rclone_server: RcloneServer,
    zoo: Zoo,
    home: Home,
    criuctl: Criuctl,
    aftermath: Aftermath,
) -> None:
    """By its ETag where it says so, by reading back with verify_writes where it lies: exit 8, the
    tree runs on.
    """
    rclone_server.make_bucket(home.token)

    def harm(path: str) -> str | None:
        file: Path = rclone_server.data / path.lstrip("/")
        content = bytearray(file.read_bytes())
        if f"/{what}/" not in path:
            return None
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        return hashlib.md5(content).hexdigest() if says == "what it has stored" else None

    animal = zoo.launch("memory.py", "8")
    animal.remember()
    before = dict(criuctl.extra)
    with FaultProxy(rclone_server.port, harm=harm) as proxy:
        criuctl.extra |= {
            **rclone_server.env,
            "CRIUCTL_S3_ENDPOINT": proxy.endpoint,
            "CRIUCTL_STORE": f"s3://{home.token}/p",
        }
        criuctl.extra |= {"CRIUCTL_VERIFY_WRITES": "yes"} if says == "what was sent" else {}
        criuctl("store", "init")
        proxy.faults = {"PUT": "X" * 1000}
        answer = criuctl("dump", animal.pid, *options, check=False)
        assert answer["exit_code"] == 8, answer
        assert answer["error"]["object"].startswith(what), answer
        proxy.faults = {}
        assert criuctl("list") == []
        assert animal.differences(animal) == []
        report = criuctl("dump", animal.pid, "--leave-running")
        criuctl("verify", report["checkpoint"])
    criuctl.extra = before
    assert aftermath.of_dump(animal) == "alive"

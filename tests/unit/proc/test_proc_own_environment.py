"""A process that goes on alone shows none of criuctl's secrets in /proc."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import os
from criuctl.proc.own_environment import forget_secrets
before = open("/proc/self/environ", "rb").read()
forget_secrets()
after = open("/proc/self/environ", "rb").read()
assert b"canary" in before and b"canary" not in after, after
assert os.environ["PLAIN"] == "stays" and "AWS_SECRET_ACCESS_KEY" not in os.environ
assert os.popen("echo $PLAIN $CRIUCTL_PASSPHRASE").read() == "stays\\n"
"""


def test_secrets_leave_the_environment_that_proc_shows() -> None:
    secrets = ("AWS_SECRET_ACCESS_KEY", "CRIUCTL_PASSPHRASE", "CRIUCTL_RECOVERY_KEY")
    env = {**os.environ, "PLAIN": "stays", **dict.fromkeys(secrets, "canary-secret")}
    subprocess.run([sys.executable, "-c", CODE], env=env, check=True, timeout=60)

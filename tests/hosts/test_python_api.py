"""The example of the page on the Python API, as it is written there, on hosts that it can move
between.
"""

from __future__ import annotations

import re
import sys

import pytest
from support.command import PROJECT
from support.hosts import Hosts

from criuctl.cli import topics

pytestmark = pytest.mark.integration

MAKEFILE = """\
all:
\techo compiled
test:
\techo passed
ask:
\t@read -p "Build? " answer; echo Build OK, $$answer
clean:
\techo cleaned
"""


def test_the_example_of_the_manual(hosts: Hosts) -> None:
    a, b = hosts.a, hosts.b
    a.path("/srv/work").mkdir(parents=True)
    a.path("/srv/work/Makefile").write_text("SHELL = /bin/bash\n" + MAKEFILE)
    a.path("/srv/bin").mkdir()
    a.path("/srv/bin/pytest").write_text("#!/bin/sh\necho 1 passed\n")
    a.path("/srv/bin/pytest").chmod(0o755)
    a.env |= {
        "CRIUCTL_STORE": "/srv/store",
        "PATH": f"/srv/bin:{a.env['PATH']}",
        "PYTHONPATH": str(PROJECT),
    }
    example = re.search(r"```python\n(.*?)```", topics.text("python-api"), re.DOTALL)
    assert example is not None
    program = example[1].replace("s3://bucket/x", "/srv/store")
    program = program.replace("ssh://root@gamma", b.ssh_url)
    checks = """
assert (r.state, r.stdout, r.exit_code) == ("done", "1 passed\\n", 0)
assert c.output().ok and "compiled" in c.output().output
assert p.number == 1 and p.frozen_ms > 0 and p.labels == {"why": "before"}
assert [one.name for one in forks] == ["work-1", "work-2", "work-3"]
"""
    program = program.replace("\ns.dump()", checks + "\ns.dump()")
    a.path("/srv/example.py").write_text(program)
    command = a.start([sys.executable, "/srv/example.py"])
    assert command.process.wait(300) == 0, command.output()
    assert b.criuctl("status", "work")["incarnation"] == 3
    b.criuctl("exec", "work", "--", "make test")
    b.criuctl("kill", "work", "--timeout", 0)

"""The other host of a migration: a criuctl there, reached over ssh, and the addresses of its
sessions.
"""

from __future__ import annotations

from ...config import Config
from ...report import Reporter
from ...transport import ssh
from ...transport.link import Request

RESTORE = 600.0  # seconds for the other host to restore


def reach(config: Config, to: str, reporter: Reporter) -> ssh.Connection:
    """Connect to a criuctl on the other host that is ready to receive."""

    def report_step(request: Request) -> None:
        if request.verb == "step":
            reporter.step("there", what=str(request.arguments.get("what"))[:40])

    return ssh.Connection.open(
        ssh.Host.parse(to, config), ["receive"], config, report_step, timeout=config.link_timeout
    )


def session_url(to: str, config: Config, session: str) -> str:
    """Return the ``ssh://`` address of the session on the other host."""
    address = ssh.Host.parse(to, config).address
    host = address.destination.rpartition("@")[2]
    user = address.destination.removesuffix(host)
    port = f":{address.port}" if address.port else ""
    return f"ssh://{user}{f'[{host}]' if ':' in host else host}{port}/{session}"

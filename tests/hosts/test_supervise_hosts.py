"""The home of a session is lost, power and disk: one of two standbys, who have seen it from its
beginning, brings it back.
"""

from __future__ import annotations

import pytest
from hosts_lab.relay import Relay
from servers.radosgw import RadosGateway
from support.hosts import Hosts
from support.keeper import wait_until
from support.supervising import COUNTER, PATIENCE, Supervised

pytestmark = pytest.mark.integration
FILES = ("--with-files", "/srv/counted", "--with-files", "/srv/counter.py")


def test_a_host_is_lost_and_one_standby_takes_over(
    hosts: Hosts, radosgw_server: RadosGateway
) -> None:
    bucket = f"supervise-{hosts.supervisor_pid}"
    radosgw_server.make_bucket(bucket)
    with Relay(hosts.c, radosgw_server.port) as relay:
        env = radosgw_server.env | {
            "AWS_ENDPOINT_URL": f"http://{relay.address}",
            "CRIUCTL_STORE": f"s3://{bucket}/kept",
        }
        for host in (hosts.a, hosts.b, hosts.c):
            host.env |= env
            host.path("/srv/counter.py").write_text(COUNTER)
        a = hosts.a
        a.criuctl("store", "init", "--no-encrypt")
        for host in (hosts.b, hosts.c):
            host.criuctl("store", "trust", "--no-encrypt")
        others = {
            host: Supervised(
                host.start_criuctl(
                    "supervise", "web", "--every", "1h", "--lease", "16s", "--standby", *FILES
                )
            )
            for host in (hosts.b, hosts.c)
        }
        a.criuctl(
            "run",
            "--name",
            "web",
            "--detach",
            "--",
            "python3.11",
            "-S",
            "/srv/counter.py",
            "/srv/counted",
        )
        home = Supervised(
            a.start_criuctl("supervise", "web", "--every", "1h", "--lease", "3s", *FILES)
        )
        stored = home.wait("snapshot")
        for other in others.values():
            other.wait("standby")
        hosts.lose(a)

        def winners() -> list[Supervised]:
            return [other for other in others.values() if other.events("recovered")]

        try:
            wait_until(winners, PATIENCE, "another host has taken over")
        except TimeoutError as error:
            raise AssertionError(
                "\n".join(other.command.output() for other in others.values())
            ) from error
        (winner,) = winners()
        back = winner.wait("recovered")
        assert (back["checkpoint"], back["from_host"], back["incarnation"]) == (
            stored["checkpoint"],
            "host-a",
            2,
        )
        assert back["recovered_ms"] > 3000 and back["lost_s"] >= 0
        winner.wait("home")
        living = next(host for host, other in others.items() if other is winner)
        counted = living.path("/srv/counted")
        size = counted.stat().st_size
        wait_until(lambda: counted.stat().st_size > size, PATIENCE, "it counts on")
        assert winners() == [winner]
        assert [event for other in others.values() for event in other.events("fenced")] == []

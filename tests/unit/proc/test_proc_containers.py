"""The container that a control group's name speaks of."""

from __future__ import annotations

import os

import pytest

from criuctl.proc.containers import Container, container_in, container_of

ID = "3f9a" * 16
SHORT = ID[:12]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/system.slice/docker-{ID}.scope", ("docker", SHORT)),
        (f"/docker/{ID}", ("docker", SHORT)),
        (f"/docker/{ID}/init.scope", ("docker", SHORT)),
        (f"/machine.slice/libpod-{ID}.scope/container", ("podman", SHORT)),
        (f"/machine.slice/libpod-conmon-{ID}.scope", None),
        (
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice/"
            f"cri-containerd-{ID}.scope",
            ("kubernetes", SHORT),
        ),
        (f"/kubepods/burstable/pod7/{ID}", ("kubernetes", SHORT)),
        ("/lxc.payload.web-1/init.scope", ("lxc", "web-1")),
        ("/lxc/web-1", ("lxc", "web-1")),
        ("/machine.slice/systemd-nspawn@debian.service/payload", ("nspawn", "debian")),
        ("/machine.slice/machine-debian.scope", ("nspawn", "")),
        ("/system.slice/docker.service", None),
        ("/user.slice/user-0.slice/session-1.scope", None),
        ("/", None),
    ],
)
@pytest.mark.parametrize("hierarchy", ["0::", "4:cpu,cpuacct:"])
def test_the_engine_and_the_id(path: str, expected: tuple[str, str] | None, hierarchy: str) -> None:
    text = f"12:net_prio:/\n{hierarchy}{path}\n1:name=x:/\n"
    assert container_in(text) == (expected and Container(*expected))


def test_a_process_of_this_host_is_in_none() -> None:
    assert container_of(os.getpid()) is None

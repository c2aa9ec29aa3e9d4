"""The processes that hold a device, their states in the driver, and the pairing of devices."""

from __future__ import annotations

import os
import stat
from typing import Any

import pytest

from criuctl.gpu import helper, holdings, use
from criuctl.gpu.devices import Device, NoPlace, pair
from criuctl.proc.descriptors import Descriptor
from criuctl.proc.mappings import Mapping

MIB = 1 << 20


def opened(path: str, fd: int = 3, mode: int = stat.S_IFCHR) -> Descriptor:
    blank: dict[str, Any] = dict.fromkeys(Descriptor._fields, 0)
    return Descriptor(
        **blank | {"fd": fd, "target": path, "mode": mode, "rdev": os.makedev(195, fd), "extra": ()}
    )


def mapped(path: str, size: int, start: int = 0x200000000) -> Mapping:
    return Mapping(start, start + size, "rw-s", 0, 0, 5, 1, path, deleted=False)


def user(pid: int, *ranges: Mapping, nodes: tuple[str, ...] = ("/dev/nvidia0",)) -> use.DeviceUser:
    return use.DeviceUser(pid, tuple(opened(node, fd) for fd, node in enumerate(nodes)), ranges)


def device(letter: str, **other: Any) -> Device:
    known: dict[str, Any] = {
        "uuid": f"GPU-{letter}",
        "name": "H200",
        "memory": 100,
        "capability": "9.0",
    }
    return Device(**known | other)


def test_only_character_devices_of_the_driver_count() -> None:
    held = {
        1: [opened("/dev/nvidia0")],
        2: [opened("/home/u/nvidia0")],
        3: [opened("/dev/nvidia0", mode=stat.S_IFREG)],
    }
    assert set(use.users(held, {4: [mapped("/dev/nvidia0", MIB)]})) == {1}
    assert set(use.users({4: []}, {4: [mapped("/dev/nvidia0", MIB)]})) == {4}


def test_a_profiler_in_the_process_is_named() -> None:
    library = mapped("/opt/libcuda-injection.so.1", MIB)
    found = use.users({1: [opened("/dev/nvidia0")]}, {1: [library]})
    assert found[1].injected == "libcuda-injection.so.1"


@pytest.mark.parametrize(
    ("sizes", "managed"),
    [((2 * MIB,), 0), ((), 0), ((2 * MIB, 2 * MIB), 2 * MIB), ((2 * MIB, 256 * MIB), 256 * MIB)],
)
def test_more_than_one_range_of_uvm_is_managed_memory(sizes: tuple[int, ...], managed: int) -> None:
    ranges = [mapped("/dev/nvidia-uvm", size) for size in sizes]
    assert user(1, *ranges, nodes=("/dev/nvidia0", "/dev/nvidiactl")).managed == managed


def test_each_device_has_a_range_of_its_own() -> None:
    two = user(1, *[mapped("/dev/nvidia-uvm", 2 * MIB)] * 2, nodes=("/dev/nvidia0", "/dev/nvidia1"))
    assert two.managed == 0


def test_processes_are_sorted_by_state_and_family() -> None:
    with_range = mapped("/dev/nvidia0", MIB)
    users = {pid: user(pid, with_range) for pid in range(10, 17)} | {17: user(17)}
    states = {
        10: helper.RUNNING,
        11: holdings.NO_CONTEXT,  # a child of 10
        12: holdings.NO_CONTEXT,  # its parent has no context
        13: holdings.SILENT,
        14: helper.LOCKED,
        15: helper.FAILED,
        16: holdings.NO_CONTEXT,  # a grandchild of 10
        17: holdings.NO_CONTEXT,
    }
    found = holdings.sort(users, states, {10: 1, 11: 10, 16: 11, 12: 1, 13: 1, 14: 1, 15: 1, 17: 1})
    kinds = {name: [u.pid for u in getattr(found, name)] for name in found.__struct_fields__}
    assert kinds == {
        "contexts": [10],
        "inherited": [11, 16],
        "idle": [17],
        "others": [12],
        "silent": [13],
        "left": [14],
        "failed": [15],
    }


def test_the_same_devices_need_no_pairs() -> None:
    assert pair([device("a")], [device("b"), device("a")]) == {}


def test_every_device_is_named_when_one_is_replaced() -> None:
    assert pair([device("a"), device("b")], [device("b"), device("c")]) == {
        "GPU-b": "GPU-b",
        "GPU-a": "GPU-c",
    }


@pytest.mark.parametrize("other", [{"name": "A100"}, {"capability": "8.0"}, {"memory": 99}])
def test_another_kind_of_device_is_no_replacement(other: dict[str, Any]) -> None:
    with pytest.raises(NoPlace, match="needs a H200") as caught:
        pair([device("a")], [device("b", **other)])
    assert "GPU-b" in str(caught.value)


def test_no_device_is_no_replacement() -> None:
    with pytest.raises(NoPlace, match="has no NVIDIA device"):
        pair([device("a")], [])

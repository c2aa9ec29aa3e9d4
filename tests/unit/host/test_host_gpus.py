"""What forbids to restore GPU processes on a host."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from criuctl.checkpoint.gpu_records import GpuDescriptor, GpuDevice, GpuProcess, GpuRecord
from criuctl.gpu.devices import Device
from criuctl.host.gpus import HostGpus, judge

OLD = GpuDevice("GPU-a", "H200", 100, "9.0")
RECORD = GpuRecord("580.159.04", 13000, (OLD,), (GpuProcess(7, 9, 60),))
HOST = HostGpus("", "580.159.04", 13000, (Device("GPU-a", "H200", 100, "9.0"),), 80)
ELSEWHERE = replace(HOST, devices=(Device("GPU-b", "H200", 100, "9.0"),))


def test_the_same_host_is_good() -> None:
    assert judge(RECORD, HOST) == ([], {})


def test_another_device_of_the_kind_takes_its_place() -> None:
    assert judge(RECORD, ELSEWHERE) == ([], {"GPU-a": "GPU-b"})


@pytest.mark.parametrize(
    ("host", "code", "texts"),
    [
        (HostGpus(error="no libcuda"), "gpu-driver", ["H200", "580.159.04", "no libcuda"]),
        (replace(HOST, driver="570.1"), "gpu-driver", ["580.159.04", "570.1", "older"]),
        (replace(HOST, driver="590.44"), "gpu-driver", ["580.159.04", "590.44"]),
        (
            replace(HOST, devices=(Device("GPU-b", "A100", 100, "8.0"),)),
            "gpu-device",
            ["H200", "A100", "9.0", "8.0"],
        ),
        (replace(ELSEWHERE, api=12090), "gpu-device", ["cannot restore onto"]),
        (replace(HOST, free=59), "gpu-memory", ["free"]),
    ],
)
def test_what_is_missing_is_named(host: HostGpus, code: str, texts: list[str]) -> None:
    (finding,), _ = judge(RECORD, host)
    assert (finding.level, finding.code) == ("error", code)
    assert finding.hint
    for text in texts:
        assert text in finding.text


def test_devices_open_without_use_need_no_driver() -> None:
    opened = GpuRecord("580.159.04", 13000, opened=(GpuDescriptor(7, 3, "/dev/nvidia0"),))
    assert judge(opened, HostGpus(error="no libcuda")) == ([], {})


@pytest.mark.parametrize(
    "bad",
    [
        {"opened": [{"pid": 7, "fd": 3, "path": "/etc/shadow"}]},
        {"opened": [{"pid": 7, "fd": 3, "path": "/dev/nvidia/../sda"}]},
        {"processes": [{"pid": 0, "thread": 1}]},
        {"devices": [{"uuid": "GPU-x y", "name": "", "memory": 1, "capability": ""}]},
    ],
)
def test_a_hostile_record_is_damaged(bad: dict[str, Any]) -> None:
    from criuctl.errors import Damaged

    with pytest.raises(Damaged):
        GpuRecord.from_dict({"driver": "1", "api": 1} | bad, "gpu")

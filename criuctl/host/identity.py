"""The identity of this host, as a checkpoint records it and a restore compares it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ..checkpoint.manifest import HostInfo
from ..config import Config, load
from .registry import boot_id


def machine_id() -> str:
    """Return the host's stable id, "" if it has none."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            return Path(path).read_text().strip()
        except OSError:
            continue
    return ""


def host_id(config: Config | None = None) -> str:
    """Return this host's name in leases: the configured one (by default, as it is found), else its
    machine id.
    """
    return (config or load()).host_id or machine_id() or platform.node()


def host_name(config: Config) -> str:
    """Return the name of this host in messages and records: the configured one, else its own."""
    return config.host_id or platform.node()


def cpu() -> tuple[str, tuple[str, ...]]:
    """Return (model name, feature flags) of the first processor."""
    model, flags = "", ""
    with open("/proc/cpuinfo") as file:
        for line in file:
            key, _, value = line.partition(":")
            key = key.strip()
            if key in ("model name", "Model", "CPU part") and not model:
                model = value.strip()
            elif key in ("flags", "Features") and not flags:
                flags = value.strip()
            if model and flags:
                break
    return model, tuple(sorted(flags.split()))


def host_info(config: Config) -> HostInfo:
    """Return the record of this host, now."""
    model, flags = cpu()
    return HostInfo(
        name=host_name(config),
        machine_id=machine_id(),
        boot_id=boot_id(),
        kernel=platform.release(),
        os=os_name(),
        arch=platform.machine(),
        cpu_model=model,
        cpu_flags=flags,
        page_size=os.sysconf("SC_PAGE_SIZE"),
    )


def os_name() -> str:
    """Return the distribution's name."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""

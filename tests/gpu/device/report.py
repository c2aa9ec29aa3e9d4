"""What is written of a run: results.json with everything, RESULT.md for people, logs.txt of what
failed.

All are written again after every case, so that a run that is stopped keeps what it had.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from .place import Place

MIB = 1 << 20


def environment(place: Place) -> dict[str, Any]:
    """Device, driver, kernel, CRIU and commit."""
    devices = []
    query = "name,uuid,driver_version,memory.total"
    argv = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=30)
        for line in done.stdout.splitlines():
            words = [word.strip() for word in line.split(",")]
            devices.append(dict(zip(query.split(","), words, strict=False)))
    except (OSError, subprocess.TimeoutExpired):
        pass
    versions = {}
    code = (
        "import importlib.metadata as m\n"
        "for n in ('torch', 'jax', 'cupy-cuda13x', 'cupy-cuda12x', 'triton'):\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    done = subprocess.run([place.python, "-c", code], check=False, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        name, _, version = line.partition(" ")
        versions[name] = version
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "devices": devices,
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory >> 30,
        "criu": place.criu_version,
        "commit": place.commit,
        "programs": versions,
    }


class Report:
    """The files of one run, in each of `folders`."""

    def __init__(self, folders: list[Path], place: Place, result: Path | None) -> None:
        self.folders = folders
        self.data: dict[str, Any] = {"environment": environment(place), "cases": [], "sections": {}}
        self.result = result if self.data["environment"]["devices"] else None
        self.logs: list[str] = []
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        # What `bench` and `run` of the same commit measured stands in one report.
        for folder in folders:
            try:
                earlier = json.loads((folder / "results.json").read_text())
            except (OSError, ValueError):
                continue
            if earlier["environment"]["commit"] == self.data["environment"]["commit"]:
                self.data["cases"], self.data["sections"] = earlier["cases"], earlier["sections"]

    def add(self, case: dict[str, Any], log: str) -> None:
        """One more case; `log` is kept if it failed."""
        self.data["cases"] = [c for c in self.data["cases"] if c["name"] != case["name"]] + [case]
        if case["result"] == "failed":
            self.logs.append(f"===== {case['name']}: {case['message']}\n{log}\n")
        self.write()

    def section(self, title: str, text: str) -> None:
        """A section of its own, in Markdown."""
        self.data["sections"][title] = text
        self.write()

    def write(self) -> None:
        """All files, again."""
        text = markdown(self.data)
        for folder in self.folders:
            _put(folder / "results.json", json.dumps(self.data, indent=1) + "\n")
            _put(folder / "RESULT.md", text)
            _put(folder / "logs.txt", "\n".join(self.logs)[: 12 * MIB])
        if self.result is not None:
            _put(self.result, text)


def merge(files: list[Path], result: Path) -> None:
    """Write one report of several runs; of a case that was run more than once, the last counts."""
    runs = [json.loads(file.read_text()) for file in files]
    cases: dict[str, Any] = {}
    sections: dict[str, str] = {}
    for run in runs:
        cases |= {case["name"]: case for case in run["cases"] if case["result"] != "not run"}
        sections |= run["sections"]
    merged = runs[-1]["environment"]
    for key in ("commit", "date"):
        merged[key] = ", ".join(dict.fromkeys(run["environment"][key] for run in runs))
    devices = [device for run in runs for device in run["environment"]["devices"]]
    merged["devices"] = list({device["uuid"]: device for device in devices}.values())
    _put(
        result,
        markdown({"environment": merged, "cases": list(cases.values()), "sections": sections}),
    )


def _put(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def markdown(data: dict[str, Any]) -> str:
    """The report for people."""
    facts = data["environment"]
    devices = [
        f"{d['name']}, {d['memory.total']}, driver {d['driver_version']}" for d in facts["devices"]
    ]
    programs = ", ".join(f"{name} {version}" for name, version in facts["programs"].items())
    out = [
        "# Real GPU programs under criuctl",
        "",
        "Written by `scripts/gpu-test`; times are seconds, medians over the cycles. `GPU` are "
        "the driver's",
        "calls, which are part of the commands' times; `MiB` is the memory that lay on the device.",
        "",
        f"- Date: {facts['date']}",
        f"- Device: {'; '.join(devices) or 'none'}",
        f"- Host: kernel {facts['kernel']}, {facts['cores']} cores, {facts['memory_gib']} GiB",
        f"- CRIU {facts['criu']}; {programs or 'no GPU libraries'}",
        f"- Commit: {facts['commit']}",
        "",
    ]
    if data["cases"]:
        out += _cases(data["cases"])
    for title, text in data["sections"].items():
        out += [f"## {title}", "", text, ""]
    return "\n".join(out).rstrip() + "\n"


COLUMNS = (
    ("snapshot", "snapshot", None),
    ("frozen", "snapshot", "frozen_ms"),
    ("dump", "dump", None),
    ("restore", "restore", None),
)
GPU = ("lock_ms", "checkpoint_ms", "restore_ms", "unlock_ms")


def _cases(cases: list[dict[str, Any]]) -> list[str]:
    good = sum(case["result"] == "ok" for case in cases)
    failed = sum(case["result"] == "failed" for case in cases)
    heads = ["case", "what", "result", "cycles", *(name for name, _, _ in COLUMNS)]
    heads += ["GPU: lock", "GPU: checkpoint", "GPU: restore", "GPU: unlock", "MiB", "notes"]
    out = [
        f"## Cases: {good} good, {failed} failed, {len(cases) - good - failed} not run",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    for case in sorted(cases, key=lambda case: int(case["order"])):
        cells = [case["name"], case["about"], case["result"], str(case.get("cycles", ""))]
        operations = case.get("operations", [])
        for _, command, key in COLUMNS:
            chosen = [
                o for o in operations if o["command"] == command and o["exit_code"] in {0, 11}
            ]
            values = [o[key] / 1000 if key else o["seconds"] for o in chosen if not key or key in o]
            cells.append(f"{statistics.median(values):.2f}" if values else "")
        gpu = [o["gpu"] for o in operations if isinstance(o.get("gpu"), dict)]
        for key in GPU:
            values = [g[key] / 1000 for g in gpu if g.get(key)]
            cells.append(f"{statistics.median(values):.2f}" if values else "")
        held = [g["bytes"] for g in gpu if g.get("bytes")]
        cells.append(f"{max(held) / MIB:.0f}" if held else "")
        cells.append(_notes(case))
        out.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return [*out, ""]


def _notes(case: dict[str, Any]) -> str:
    if case["result"] != "ok":
        return str(case["message"]).strip().partition("\n")[0][:300]
    notes = case.get("notes", {})
    texts = []
    if "steps_equal" in notes:
        texts.append(f"{notes['steps_equal']} steps equal to the twin's, bit by bit")
    if "tokens_equal" in notes:
        texts.append(f"{notes['tokens_equal']} tokens equal")
    if "new_bytes" in notes:
        texts.append("new bytes: " + ", ".join(f"{n / MIB:.0f} MiB" for n in notes["new_bytes"]))
    if "dump" in notes:
        texts.append(str(notes["dump"]).partition("\n")[0][:200])
    return "; ".join(texts)

"""Several processes on one device in one tree: ``several.py FOLDER [COUNT]``; the parent itself has
no CUDA.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from steplog import FOLDER


def main() -> None:
    """Start the children; each trains with a seed of its own in a folder of its own."""
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    program = str(Path(__file__).with_name("torch_train.py"))
    folders = [FOLDER / f"child-{number}" for number in range(count)]
    children = [
        subprocess.Popen([sys.executable, program, str(folder), "eager", str(11 + number)])
        for number, folder in enumerate(folders)
    ]
    while any(child.poll() is None for child in children):
        if (FOLDER / "stop").exists():
            for folder in folders:
                (folder / "stop").touch()
        time.sleep(0.02)
    failed = [child.returncode for child in children if child.returncode]
    if failed:
        raise SystemExit(f"children ended with {failed}")
    (FOLDER / "end").write_text("end\n")


if __name__ == "__main__":
    main()

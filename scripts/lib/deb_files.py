"""Write the units and the configuration of the Debian package; run by scripts/build-deb with the
Python of the package.

deb_files.py ROOT
"""

from __future__ import annotations

import sys
from pathlib import Path

from criuctl.cli import config_table
from criuctl.ops.scheduling.units import NAMES, Unit

COMMAND = "/usr/bin/criuctl"


def main(root: Path) -> None:
    """Write the files below `root`."""
    folder = root / "usr/lib/systemd/system"
    folder.mkdir(parents=True)
    for unit in map(Unit, NAMES):
        (folder / unit.file).write_text(unit.text([COMMAND], {"HOME": "/root"}))
    config = root / "etc/criuctl/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(config_table.sample())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

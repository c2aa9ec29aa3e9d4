"""Write the units and the configuration of the Debian package; run by scripts/build-deb with the
Python of the package.

deb_files.py ROOT
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from criuctl.cli import topics
from criuctl.ops.scheduling.units import NAMES, Unit

COMMAND = "/usr/bin/criuctl"


def configuration() -> str:
    """Return a configuration with every key, its meaning and its default, all commented out: the
    manual's page on them, in another form.
    """
    lines = [
        "# The configuration of criuctl: `man criuctl-configuration`.  Remove a # to set a key."
    ]
    for block, texts in topics.blocks(topics.text("configuration")):
        text = " ".join(texts)
        if text.startswith("## "):
            lines += ["", f"## {text.removeprefix('## ')}"]
        elif block == "item" and "Example: `" in text:
            key = text.split("`")[1]
            meaning, example = text.split("Example: ")
            meaning = meaning.removeprefix(f"`{key}`: ").strip()
            wrapped = textwrap.wrap(meaning, 96, break_long_words=False)
            lines += ["", *(f"# {line}" for line in wrapped), f"#{example.strip('`')}"]
    return "\n".join(lines) + "\n"


def main(root: Path) -> None:
    """Write the files below `root`."""
    folder = root / "usr/lib/systemd/system"
    folder.mkdir(parents=True)
    for unit in map(Unit, NAMES):
        (folder / unit.file).write_text(unit.text([COMMAND], {"HOME": "/root"}))
    config = root / "etc/criuctl/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(configuration())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

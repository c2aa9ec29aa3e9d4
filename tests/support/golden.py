"""Makes the golden checkpoints: small stores as this version writes them, which every later version
must read.

    PYTHONPATH=.:tests python tests/support/golden.py VERSION

writes ``images/golden/VERSION/`` with a store that is not encrypted, one that is, the key file of
the latter and those of a write-only host that has added to it (committed, so they protect nothing),
what the stores hold, and the newest checkpoint of each as an exported file.  The content is made
up; no process's memory is in it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from criuctl.checkpoint import layers, leases
from criuctl.checkpoint.manifest import Manifest
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.ops import transfer
from criuctl.report import Reporter
from criuctl.store.local import LocalStore
from support import checkpoints as kit
from support.writeonly import enrol, host

FOLDER = Path(__file__).parents[2] / "images" / "golden"
KEY = "test-key-that-protects-nothing.key"
WRITER = "writer"  # the folder with the keys of the write-only host
HOST = "0" * 32


def contents() -> list[kit.Content]:
    """What the checkpoints of each golden store hold: the second shares most with the first, the
    third is in layers.
    """
    pages = [n.to_bytes(2, "little") * 2048 for n in range(70)]
    images = {"inventory.img": b"golden inventory\n" * 9, "core-7.img": b"golden core\n" * 50}
    first = kit.Content(b"".join(pages), images, b"a golden file\n" * 30, window=4096)
    second = kit.Content(
        b"".join([*pages[:69], b"new!" * 1024, bytes(4096)]), images, b"", window=4096
    )
    third = kit.Content(
        b"".join([pages[n] if n % 9 else bytes([n]) * 4096 for n in range(70)]),
        images,
        b"",
        before=first.memory,
    )
    return [first, second, third]


def describe(repository: Repository, manifest: Manifest) -> dict[str, object]:
    """What a reader must find: the manifest, and a digest of each stream."""
    reader = repository.reader(Reporter())
    found = manifest.to_dict()
    return {
        "manifest": found,
        "streams": [hashlib.sha256(reader.read(ref)).hexdigest() for ref in manifest.streams()],
    }


def export(config: Config, file: Path) -> None:
    """Write the newest checkpoint of a golden store to a file."""
    transfer.export(config, "golden", file, reporter=Reporter())


def make(version: str) -> None:
    """Write the golden stores of `version`; an existing one is never replaced."""
    target = FOLDER / version
    target.mkdir(parents=True)
    expected = {}
    for name in ("plain", "encrypted"):
        store = LocalStore(str(target / name))
        with tempfile.TemporaryDirectory() as folder:
            config = kit.config(
                Path(folder),
                key_file=str(Path(folder) / KEY) if name == "encrypted" else "",
                workers=1,
            )
            key = Path(config.key_file) if config.key_file else None
            layers.LITTLE = 0  # so small a memory would be stored whole
            with Repository.init(
                store, encryption=key is not None, key_file=key, config=config
            ) as repository:
                for content, uid in zip(contents(), (0, 1000, 1001), strict=True):
                    kit.write(
                        repository, content, session="golden", labels={"made": "by hand"}, uid=uid
                    )
                leases.claim(repository, "golden", "ab" * 16, 2, host=HOST, host_name="golden-host")
                if key is not None:
                    enrol(repository, Path(folder) / WRITER, "golden writer")
                    with host(store, Path(folder) / WRITER) as writer:
                        kit.write(
                            writer,
                            contents()[1],
                            session="golden",
                            labels={"made": "by a write-only host"},
                            uid=1000,
                        )
                    shutil.copytree(Path(folder) / WRITER / "keys", target / WRITER)
                expected[name] = [
                    describe(repository, repository.manifest(s)) for s in repository.list()
                ]
            export(config.with_options(store=store.url), target / f"{name}.exported")
            if key is not None:
                shutil.copyfile(key, target / KEY)
        for left in (".tmp", ".cache"):
            shutil.rmtree(target / name / left)
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    make(sys.argv[1])

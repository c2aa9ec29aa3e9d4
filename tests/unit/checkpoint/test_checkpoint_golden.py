"""Checkpoints that older versions wrote are read by this one, and what this one writes is what the
schema says.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support import checkpoints as kit
from support import golden

from criuctl.checkpoint import (
    chunks,
    codec,
    connection_record,
    file_records,
    gpu_records,
    index,
    leases,
    objects,
    packs,
    terminal_records,
    writer_keys,
)
from criuctl.checkpoint import manifest as manifests
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.manifest import Manifest
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Damaged, DataError
from criuctl.report import Reporter
from criuctl.store import archive
from criuctl.store.local import LocalStore

IMAGES = golden.FOLDER.parent
SCHEMA = json.loads((IMAGES / "manifest.schema.json").read_text())
VERSIONS = sorted(path.name for path in golden.FOLDER.iterdir() if path.is_dir())


def validate(manifest: Any) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest)


def test_there_are_golden_checkpoints() -> None:
    assert {"1", "1-layers", "1-writers", "1-masked"} <= set(VERSIONS)


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoints_are_read(tmp_path: Path, version: str, kind: str) -> None:
    source = golden.FOLDER / version
    shutil.copytree(source / kind, tmp_path / "store")
    key = tmp_path / golden.KEY
    shutil.copyfile(source / golden.KEY, key)
    key.chmod(0o600)
    config = kit.config(tmp_path, key_file=str(key) if kind == "encrypted" else "")
    expected = json.loads((source / "expected.json").read_text())[kind]
    with Repository.open(LocalStore(str(tmp_path / "store")), config) as repository:
        summaries = repository.list()
        assert [s.number for s in summaries] == [e["manifest"]["number"] for e in expected]
        for summary, wanted in zip(summaries, expected, strict=True):
            manifest = repository.manifest(summary)
            assert (
                json.loads(json.dumps(golden.describe(repository, manifest)))["streams"]
                == wanted["streams"]
            )
            assert manifest == Manifest.from_dict(wanted["manifest"])
            repository.verify(manifest, Reporter())
            validate(manifest.to_dict())
        head = leases.read_head(repository, "golden")
        assert head is not None and head.host == golden.HOST and head.epoch == 1
        kit.check(repository, kit.write(repository, session="golden"))  # and goes on with it
        assert repository.resolve("golden").number == len(expected) + 1
        assert Collection(repository, Reporter(), grace=0).run().lost == 0
        for summary in repository.list():
            repository.verify(repository.manifest(summary), Reporter())


def test_the_golden_write_only_host_reads_its_own_and_goes_on(tmp_path: Path) -> None:
    source = golden.FOLDER / "1-writers"
    shutil.copytree(source / "encrypted", tmp_path / "store")
    shutil.copytree(source / golden.WRITER, tmp_path / "keys")
    for file in (tmp_path / "keys").iterdir():
        file.chmod(0o600)
    expected = json.loads((source / "expected.json").read_text())["encrypted"]
    hidden: list[DataError] = []
    with Repository.open(LocalStore(str(tmp_path / "store")), kit.config(tmp_path)) as repository:
        (mine,) = repository.list(hidden=hidden)
        manifest = repository.manifest(mine)
        assert (
            json.loads(json.dumps(golden.describe(repository, manifest)))["streams"]
            == expected[-1]["streams"]
        )
        assert (
            manifest == Manifest.from_dict(expected[-1]["manifest"])
            and len(hidden) == len(expected) - 1
        )
        repository.verify(manifest, Reporter())
        before = repository.index.pack_sizes()
        kit.check(
            repository,
            kit.write(repository, golden.contents()[1], session="golden"),
            golden.contents()[1],
        )
        assert repository.index.pack_sizes() == before  # it knows all that it has stored


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_schema_names_what_the_records_have() -> None:
    records = {
        "connection": connection_record.ConnectionRecord,
        "external": file_records.ExternalFile,
        "fifo": file_records.FifoRecord,
        "file": file_records.FileRecord,
        "gpu": gpu_records.GpuRecord,
        "gpu_descriptor": gpu_records.GpuDescriptor,
        "gpu_device": gpu_records.GpuDevice,
        "gpu_process": gpu_records.GpuProcess,
        "holder": terminal_records.HolderRecord,
        "host": manifests.HostInfo,
        "image": manifests.ImageFile,
        "link": file_records.LinkRecord,
        "memory": manifests.MemoryImage,
        "predicate": manifests.PredicateRecord,
        "process": manifests.ProcessRecord,
        "session": manifests.SessionRef,
        "terminal": terminal_records.TerminalRecord,
    }
    named = {name: set(SCHEMA["$defs"][name]["properties"]) for name in records}
    assert named == {
        name: set(record.__struct_fields__) - {"extra"} for name, record in records.items()
    }
    assert set(SCHEMA["properties"]) - {"origin"} == set(Manifest.__struct_fields__) - {
        "extra",
        "image_data",
    }


def test_manifests_fit_the_schema_and_others_do_not(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    manifest = repo.manifest(kit.write(repo)).to_dict()
    validate(manifest)
    validate({**manifest, "of_a_newer_version": {"any": ["thing"]}})
    for path, wrong in (
        (("id",), "A" * 32),
        (("id",), None),
        (("session", "name"), "../x"),
        (("images", "files", 0, "name"), "../x"),
        (("images", "files", 0, "size"), -1),
        (("memory", 0, "kind"), "other"),
        (("memory", 0, "data"), {"size": 1}),
        (("memory", 0, "data"), {"size": 1, "chunks": [["00", 1]]}),
        (("memory", 0, "data"), {"size": 0, "pages": {"size": 0, "chunks": []}}),
        (("memory", 0, "data"), {"size": 0, "chunks": [], "runs": {"size": 0, "chunks": []}}),
        (("files", 0, "path"), "relative"),
        (("files", 0, "uid"), 1 << 32),
        (("files", 0, "xattrs"), {"user.a": "?"}),
        (("created",), "yesterday"),
        (("processes", 0, "pid"), "7"),
        (("labels",), {"a": 1}),
    ):
        broken = json.loads(json.dumps(manifest))
        at = broken
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = wrong
        with pytest.raises(jsonschema.ValidationError):
            validate(broken)
        with pytest.raises(Damaged):
            Manifest.from_dict(broken)


def test_the_specification_tells_the_sizes_that_the_code_uses() -> None:
    """Layouts in FORMAT.md are tables of ``| offset | size | ...``; each adds up to what the code
    packs.
    """
    text = (IMAGES / "FORMAT.md").read_text()
    tables = {}
    for title, table in re.findall(r"<!-- layout: (\w+) -->\n((?:\|.*\n)+)", text):
        rows = [
            [cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]
        ]
        end = 0
        for offset, size, *_rest in rows:
            assert int(offset) == end, title
            end += int(size)
        tables[title] = end
    assert tables == {
        "pack_header": packs.HEADER.size,
        "pack_record": packs.RECORD.size,
        "pack_entry": packs.PACK_ENTRY.size,
        "pack_footer": packs.FOOTER.size,
        "object_header": objects.HEADER.size,
        "segment_pack": index.PACK.size,
        "writer_domain": writer_keys.WRAPPED.size,
        "list_entry": chunks.CHUNK_ENTRY.size,
        "run": chunks.RUN.size,
        "archive_header": archive.HEADER.size,
        "archive_section": archive.SECTION.size,
    }
    for context in codec.CONTEXTS:
        assert f"`{context}`" in text
    for context in writer_keys.CONTEXTS:
        assert f'derive_key("{context}"' in text

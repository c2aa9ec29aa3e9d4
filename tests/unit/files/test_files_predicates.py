"""What a checkpoint requires: what can be said, what becomes stale, and whose commands are run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from criuctl.checkpoint.chunks import StreamRef
from criuctl.checkpoint.manifest import Manifest, PredicateRecord, SessionRef
from criuctl.config import Config, load
from criuctl.errors import ConfigError, Damaged, PreflightRefused, UsageError
from criuctl.files import predicates
from criuctl.proc.credentials import Credentials


def manifest(*required: PredicateRecord, hours: float = 0.0) -> Manifest:
    created = (
        (datetime.now(UTC) - timedelta(hours=hours))
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
    plain = Manifest(
        id="ab" * 16, session=SessionRef("web", "cd" * 16), created=created, image_data=StreamRef()
    )
    return Manifest.from_dict(predicates.with_required(plain, required).to_dict())


def state(config: Config, *required: PredicateRecord, hours: float = 0.0) -> tuple[str, str]:
    (verdict,) = predicates.verdicts(config, manifest(*required, hours=hours))
    return verdict.state, verdict.why


@pytest.mark.parametrize(
    "wrong",
    ["", "file", "file:", "files:/x", "age:soon", "age:0", "command: ", "output:" + "x" * 5000],
)
def test_what_is_no_requirement(wrong: str) -> None:
    with pytest.raises(UsageError):
        predicates.parse(wrong)
    with pytest.raises(ConfigError, match=r"'w\*'"):
        predicates.wanted(Config(predicates={"w*": (wrong,)}), "web")


def test_the_first_pattern_that_fits_counts_and_options_add_to_it() -> None:
    config = load(
        environ={"CRIUCTL_PREDICATES": '{"web-*": ["age:1d"], "web*": ["age:2d", "command:true"]}'}
    )
    assert predicates.wanted(config, "web-1", ["age:1d", "file:/x/../y"]) == [
        ("age", "1d"),
        ("file", "/y"),
    ]
    assert predicates.wanted(config, "web") == [("age", "2d"), ("command", "true")]
    assert predicates.wanted(config, "db") == []
    with pytest.raises(ConfigError, match="lists of text"):
        load(environ={"CRIUCTL_PREDICATES": '{"web": "age:1d"}'})


@pytest.mark.parametrize(("hours", "holds"), [(-1, True), (1, True), (35.9, True), (36.1, False)])
def test_age(hours: float, holds: bool) -> None:
    assert (state(Config(), PredicateRecord("age", "1d12h"), hours=hours)[0] == "holds") is holds


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"then")
    config = Config(state_dir=str(tmp_path))
    (noted,) = predicates.note(config, [("file", str(path))])
    assert state(config, noted) == ("holds", "")
    for content, why in ((b"else", "other contents"), (b"longer", "4 bytes at the dump and is 6")):
        path.write_bytes(content)
        assert why in state(config, noted)[1]
    path.unlink()
    assert "No such file" in state(config, noted)[1]
    os.mkfifo(path)
    assert state(config, noted) == ("stale", "it is no regular file")
    for impossible in (str(path), str(tmp_path / "absent"), "/proc/version"):
        with pytest.raises(PreflightRefused):
            predicates.note(config, [("file", impossible)])


def test_manifests_with_predicates_fit_the_schema(tmp_path: Path) -> None:
    schema = json.loads((Path(__file__).parents[3] / "images" / "manifest.schema.json").read_text())
    noted = predicates.note(
        Config(state_dir=str(tmp_path)), [("output", "echo 1"), ("file", __file__), ("age", "7d")]
    )
    body = manifest(*noted).to_dict()
    assert body["features"] == ["predicates"]
    jsonschema.Draft202012Validator(schema).validate(body)
    body["predicates"][0]["kind"] = "other"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(body)


def test_a_command_that_is_no_text(tmp_path: Path) -> None:
    """Names of files are bytes, and commands have them in them."""
    config = Config(state_dir=str(tmp_path / "state"))
    (tmp_path / "\udcff").write_text("x")
    (noted,) = predicates.note(config, [predicates.parse(f"command:test -s '{tmp_path}/\udcff'")])
    assert state(config, noted) == ("holds", "")


def test_only_our_own_commands_and_allowed_ones_are_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    ours = Config(state_dir=str(tmp_path / "ours"), hook_timeout=30)
    text = f"touch {ran}; echo 7"
    (noted,) = predicates.note(ours, [("output", text)])
    ran.unlink()
    theirs = replace(ours, state_dir=str(tmp_path / "theirs"))
    for config, record in (
        (theirs, noted),
        (ours, replace(noted, argument=text + " ")),
        (ours, replace(noted, kind="command")),
        (ours, replace(noted, mac="")),
        (ours, replace(noted, mac="0" * 64)),
        (replace(theirs, predicates={"*": (f"command:{text}",)}), noted),
    ):
        assert state(config, record)[0] == "unchecked"
    assert not ran.exists()
    assert not (tmp_path / "theirs").exists()
    assert state(ours, noted)[0] == "holds"
    assert state(replace(theirs, predicates={"*": (f"output:{text}",)}), noted)[0] == "holds"
    assert ran.exists()
    assert (tmp_path / "ours" / "predicates.key").stat().st_mode & 0o777 == 0o600
    (failed,) = predicates.examine(ours, manifest(replace(noted, digest="0" * 64)), force=True)
    assert (failed.level, failed.code) == ("warning", "stale")
    with pytest.raises(PreflightRefused, match="ended with 3: sorry"):
        predicates.note(ours, [("command", "echo sorry >&2; exit 3")])


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "other"},
        {"argument": ""},
        {"kind": "file"},
        {"digest": "00"},
        {"mac": "x"},
        {"size": -1},
    ],
)
def test_malformed_records(wrong: dict[str, object]) -> None:
    with pytest.raises(Damaged):
        PredicateRecord.from_dict({"kind": "command", "argument": "true", **wrong})


ROOT, NOBODY = Credentials(0, 0), Credentials(65534, 65534)


def asked(
    config: Config, kind: str, argument: str, user: Credentials = ROOT, *, foreign: bool = False
) -> PredicateRecord:
    """What is recorded of one predicate that a program asks for."""
    one = {"kind": kind, "argument": argument, "foreign": foreign}
    (record,) = predicates.note_asked(config, [one], user)
    return record


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_what_a_program_asks_for_is_noted_with_its_own_rights(tmp_path: Path, public: Path) -> None:
    config, file = Config(state_dir=str(tmp_path / "state")), public / "file"
    file.write_text("x")
    file.chmod(0o600)
    assert state(config, asked(config, "file", str(file))) == ("holds", "")
    refused = asked(config, "file", str(file), NOBODY)
    assert (refused.digest, "may not read it" in refused.unmet) == ("", True)
    found, why = state(config, refused)
    assert found == "stale" and "could not be noted at the dump" in why
    file.chmod(0o644)
    assert state(config, asked(config, "file", str(file), NOBODY)) == ("holds", "")
    link = public / "link"  # another user's: it may lead to where only root may look
    link.symlink_to(file)
    os.chown(link, 4711, 4711, follow_symlinks=False)
    assert asked(config, "file", str(link), NOBODY).unmet
    os.truncate(file, predicates.MOST_ASKED + 1)
    assert "of at most" in asked(config, "file", str(file)).unmet
    assert asked(config, "age", "7d") == PredicateRecord("age", "7d")


def test_root_runs_no_command_that_it_has_not_accepted(tmp_path: Path) -> None:
    config, ran = Config(state_dir=str(tmp_path / "state")), tmp_path / "ran"
    command = f"touch {ran}"
    for record in (
        asked(config, "command", command, NOBODY),
        asked(config, "command", command, foreign=True),
    ):
        assert (record.unmet != "", record.mac) == (True, "")
        assert state(config, record)[0] == "stale" and not ran.exists()
    configured = replace(config, predicates={"none": (f"command:{command}",)})
    assert asked(configured, "command", command, foreign=True).unmet == "" and ran.exists()
    # one of its own that fails is stale, and still its own for the next home here
    failed = asked(config, "command", "exit 3")
    assert "ended with 3" in failed.unmet and failed.mac
    assert predicates.note_asked(config, [{"kind": "age", "argument": "0"}], ROOT) == ()

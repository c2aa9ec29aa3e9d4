"""criuctl config: what is set and where, each fault with its line, the table, the sample."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import confinement

from criuctl import config
from criuctl.cli import config_table

Run = Callable[..., subprocess.CompletedProcess[str]]


class Setting:
    """criuctl with a configuration file of the user's, and nothing else."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.file = folder / "criuctl" / "config.yaml"
        self.file.parent.mkdir()

    def __call__(self, *words: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        # Variables outweigh the file, and those of the run are not this user's.
        nothing = dict.fromkeys(confinement.folders(), "")
        own = {**nothing, "XDG_CONFIG_HOME": str(self.folder), **env}
        done = self.run("config", *words, env=own)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *words: str, code: int = 0, **env: str) -> Any:
        return json.loads(self(*words, "--json", code=code, **env).stdout)


@pytest.fixture
def setting(criuctl: Run, tmp_path: Path) -> Setting:
    return Setting(criuctl, tmp_path)


def test_show_has_what_is_set_and_where(setting: Setting, tmp_path: Path) -> None:
    setting.file.write_text("# mine\nstore: /srv/a\ncompression: 3\nhook_env: [SITE]\n")
    more = tmp_path / "more.yaml"
    more.write_text("trees: {web: {unit: nginx, order: 1}}\ncompression: 4\n")
    shown = setting("show", "--config", str(more), CRIUCTL_STORE="/srv/b", CRIUCTL_WORKERS="2")
    assert yaml.safe_load(shown.stdout) == {
        "store": "/srv/b",
        "compression": 4,
        "workers": 2,
        "hook_env": ["SITE"],
        "trees": {"web": {"unit": "nginx", "order": 1}},
    }
    places = {line.split(":")[0]: line.partition("  # ")[2] for line in shown.stdout.splitlines()}
    assert places == {
        "store": "CRIUCTL_STORE",
        "compression": f"{more}:2",
        "workers": "CRIUCTL_WORKERS",
        "hook_env": f"{setting.file}:4",
        "trees": f"{more}:1",
    }
    body = setting.json("show", "--store", "/srv/c")
    assert body["files"] == [str(setting.file)] and list(body["keys"]) == [
        "store",
        "compression",
        "hook_env",
    ]
    assert body["keys"]["store"] == {
        "value": "/srv/c",
        "source": "option",
        "file": None,
        "line": None,
        "variable": "--store",
    }
    compression = body["keys"]["compression"]
    assert (compression["source"], compression["line"]) == ("file", 3)


def test_show_without_anything(setting: Setting) -> None:
    said = setting("show").stdout
    assert yaml.safe_load(said) is None
    assert str(setting.file) in said and str(config.SYSTEM_FILE) in said


def test_the_effective_configuration_is_a_file_that_means_the_same(setting: Setting) -> None:
    setting.file.write_text(
        "connection_rules: [{match: {port: 5432}, policy: reconnect}]\nmax_freeze: {snapshot: 7}\n"
        "predicates: {'db*': ['age:7d']}\ns3_timeout: 2.5\nhook_failure: {frozen: veto}\n"
    )
    shown = setting("show", "--effective", "-q").stdout
    assert list(yaml.safe_load(shown)) == list(config.KEYS)
    copy = setting.folder / "copy.yaml"
    copy.write_text(shown)
    nothing = {"XDG_CONFIG_HOME": "/proc/nonexistent"}
    before, after = config.load(str(setting.file), nothing), config.load(str(copy), nothing)
    freeze = {**config.MAX_FREEZE, "snapshot": 7.0}
    rules = [rule for _where, rule in before.connection_rules]
    assert [rule for _where, rule in after.connection_rules] == rules
    assert after.max_freeze == freeze
    same: dict[str, Any] = {"connection_rules": (), "max_freeze": freeze, "sources": ()}
    assert after.with_options(**same) == before.with_options(**same)
    assert {one["source"] for one in setting.json("show", "--effective")["keys"].values()} == {
        "file",
        "default",
    }


def test_no_credentials_are_shown(setting: Setting) -> None:
    setting.file.write_text("s3_endpoint: 'https://me:canary@s3.example.com'\n")
    faulty = setting.folder / "faulty.yaml"
    faulty.write_text("events: 'https://me:canary@s3.example.com'\n")
    for words in (["show"], ["show", "--json"], ["show", "-q"]):
        done = setting(*words)
        assert "canary" not in done.stdout and "s3.example.com" in done.stdout
    for more in ([], ["--json"]):
        done = setting("check", str(faulty), *more, code=2)
        assert "canary" not in done.stdout + done.stderr and "s3.example.com" in done.stdout


FAULTY = """\
stor: /srv/x
compression: 99
buffers-mib: 3
compression: 5
connection_rules:
  - {match: {prot: 1}, policy: keep}
  - {match: {port: 1}, policy: kep}
retention: {web: {keep_dayly: 3}}
hosts: {gamma: {url: 7}}
trees: {web: {}, db: {unit: x, port: 1}}
gc_grace: soon
detach_key: much
hook_dirs: [relative]
predicates: {"db*": [age]}
xyzzy: 1
"""


def test_check_names_line_and_key_of_every_fault(setting: Setting) -> None:
    setting.file.write_text(FAULTY)
    body = setting.json("check", code=2)
    assert not body["ok"] and body["files"] == [str(setting.file)]
    assert {one["file"] for one in body["findings"]} == {str(setting.file)}
    assert [(one["line"], one["key"], one["level"]) for one in body["findings"]] == [
        (1, "stor", "error"),
        (3, "buffers-mib", "error"),
        (4, "compression", "warning"),
        (5, "connection_rules", "error"),
        (5, "connection_rules", "error"),
        (8, "retention", "error"),
        (9, "hosts", "error"),
        (10, "trees", "error"),
        (10, "trees", "error"),
        (11, "gc_grace", "error"),
        (12, "detach_key", "error"),
        (13, "hook_dirs", "error"),
        (14, "predicates", "error"),
        (15, "xyzzy", "error"),
    ]
    hints = [one["hint"] for one in body["findings"]]
    assert hints[0] == "Did you mean store?" and hints[1] == "Did you mean buffers_mib?"
    assert "explain" in hints[-1]
    said = setting("check", code=2).stdout
    assert f"{setting.file}:1: unknown key 'stor'\n  hint: Did you mean store?" in said
    assert f"warning: {setting.file}:4: compression is given before, in line 2" in said
    assert "connection_rules[2]: policy must be" in said


def test_a_value_of_the_wrong_kind(setting: Setting) -> None:
    setting.file.write_text("\nevents: journal\nworkers: many\nstate_dir: here\nstore: ftp://x\n")
    found = setting.json("check", code=2)["findings"]
    assert [(one["line"], one["key"]) for one in found] == [
        (2, "events"),
        (3, "workers"),
        (4, "state_dir"),
        (5, "store"),
    ]
    assert found[0]["text"] == "events must be one of none, journald, syslog, not 'journal'"


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: [\n\n", 3), ("a: b: c\n", 1), ("- a\n", 1), ("\x00", None), ("\tb: 1", 1)],
)
def test_what_is_no_mapping(setting: Setting, text: str, line: int | None) -> None:
    setting.file.write_text(text)
    (fault,) = setting.json("check", code=2)["findings"]
    assert (fault["line"], fault["file"]) == (line, str(setting.file))


def test_a_file_that_others_can_write_is_a_fault(setting: Setting) -> None:
    setting.file.write_text("workers: 2\n")
    setting.file.chmod(0o666)
    (fault,) = setting.json("check", code=2)["findings"]
    assert "chmod" in fault["hint"] and fault["file"] == str(setting.file)


def test_check_of_one_file_and_of_none(setting: Setting, tmp_path: Path) -> None:
    assert str(setting.file) in setting("check").stdout
    setting.file.write_text("stor: 1\n")
    new = tmp_path / "new.yaml"
    new.write_text("workers: 2\n")
    assert setting("check", str(new), CRIUCTL_WORKERS="x").stdout == f"{new}: no faults\n"
    assert setting("check", str(new), "-q").stdout == ""
    assert setting.json("check", "--config", str(new), code=2)["files"] == [
        str(setting.file),
        str(new),
    ]
    setting("check", str(tmp_path / "absent"), code=2)


def test_variables_are_checked_too(setting: Setting) -> None:
    (fault,) = setting.json("check", code=2, CRIUCTL_WORKERS="x")["findings"]
    assert (fault["file"], fault["key"], fault["line"]) == ("CRIUCTL_WORKERS", "workers", None)
    (slip,) = setting.json("check", CRIUCTL_STROE="x", CRIUCTL_OPERATOR="me")["findings"]
    assert (slip["file"], slip["level"]) == ("CRIUCTL_STROE", "warning")
    assert "CRIUCTL_STORE" in slip["hint"]


def test_a_command_with_an_unknown_key_names_near_ones(setting: Setting, criuctl: Run) -> None:
    setting.file.write_text("detach_keys: C-a\n")
    done = criuctl("store", "info", env={"XDG_CONFIG_HOME": str(setting.folder)})
    assert done.returncode == 2 and "Did you mean detach_key?" in done.stderr
    assert "criuctl config check" in done.stderr


def test_explain(setting: Setting) -> None:
    said = setting("explain", "gc_grace", "CRIUCTL_EVENTS").stdout
    for part in (
        "gc_grace (text)\n",
        "  Default:   1d\n",
        "  Example:   gc_grace: 6h\n",
        "  Variable:  CRIUCTL_GC_GRACE",
        "events (none or journald or syslog)\n",
    ):
        assert part in said
    assert "](" not in setting("explain").stdout
    assert setting("explain", "-q").stdout.split() == [*config_table.table()]
    (one,) = setting.json("explain", "workers")
    assert one == {
        "key": "workers",
        "section": "Dump and restore",
        "type": "whole number from 0 to 1024",
        "default": "0",
        "meaning": "threads that compress and seal; 0 means one for each core.",
        "example": "workers: 2",
        "variable": "CRIUCTL_WORKERS",
    }
    assert "Did you mean gc_grace" in setting("explain", "gc-grase", code=2).stderr


def test_the_table_is_that_of_the_configuration() -> None:
    assert sorted(config_table.table()) == sorted(config.KEYS)
    assert all(key.kind and key.section for key in config_table.table().values())


def test_the_sample_has_every_key_and_changes_nothing(setting: Setting) -> None:
    text = config_table.sample()
    assert setting("sample").stdout == text and setting.json("sample")["text"] == text
    assert yaml.safe_load(text) is None
    assert all(line.startswith("#") or not line for line in text.splitlines())
    assert all(len(line) <= 100 for line in text.splitlines())
    unlocked = "\n".join(
        line[1:] for line in text.splitlines() if line[1:2].isalpha() or line[1:3] == "  "
    )
    loaded = yaml.safe_load(unlocked)
    assert list(loaded) == [*config_table.table()]
    for key, value in loaded.items():
        wanted = config.MAX_FREEZE if key == "max_freeze" else getattr(config.Config(), key)
        assert config.value_of(key, value, "sample") == wanted
    setting("sample", "--output", str(setting.file))
    assert setting.file.read_text() == text
    setting("sample", "--output", str(setting.file), code=9)
    setting("sample", "--output", "/proc/nonexistent/x", code=2)
    setting("check")
    assert os.stat(setting.file).st_mode & 0o022 == 0

"""The doctor on this very host, and on hosts with something wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.ops.doctor import doctor, versions
from criuctl.report import Finding
from criuctl.store import open_store

pytestmark = pytest.mark.integration

SECRET = "verySecretAccessKey"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A configuration whose folders are all in `tmp_path`."""
    return Config(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
        key_dir=str(tmp_path / "keys"),
        s3_endpoint="http://127.0.0.1:9",
        s3_retries=1,
        s3_timeout=2.0,
    )


def _errors(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.code, f.text) for f in found if f.level == "error"]


def _finding(found: list[Finding], code: str) -> Finding:
    (only,) = [f for f in found if f.code == code]
    return only


def test_this_host_is_ready(config: Config, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    found = doctor(config)
    assert _errors(found) == []
    assert _finding(found, "no-such-bucket").level == "info", (
        "a local store is made at the first dump"
    )
    assert set(tmp_path.rglob("*")) == before, "nothing is left behind"
    assert "CRIU" in _finding(found, "criu").text
    assert _finding(found, "soft-dirty").level == "info", "pre-copy works with and without"
    levels = [("error", "warning", "info").index(f.level) for f in found]
    assert levels == sorted(levels)


def test_what_is_read_when_it_is_needed_is_looked_at(config: Config) -> None:
    bad = replace(
        config,
        trees={"web": {"unit": "nginx", "port": 80}},
        retention={"*": {"keep_lst": 3}},
        predicates={"db": ("nope:x",)},
        gc_grace="soon",
        detach_key="Q-Q-Q",
        hosts={"good": {"url": "ssh://root@good"}, "bad": {"command": "criuctl"}},
    )
    assert _errors(doctor(config)) == []
    said = [text for _, text in _errors(doctor(bad))]
    wanted = [
        "'port'",
        "'keep_lst'",
        "'nope:x'",
        "gc_grace: 'soon'",
        "detach_key: ",
        "hosts: bad: url is missing",
    ]
    assert [part for part in wanted if not any(part in text for text in said)] == []
    assert len(said) == len(wanted)


def test_connection_rules_are_read(config: Config) -> None:
    good = replace(config, connection_rules=(("rules: connection_rules[1]", {"policy": "keep"}),))
    assert _finding(doctor(good), "connection-rules").text.startswith("1 connection rule")
    bad = replace(config, connection_rules=(("rules: connection_rules[1]", {"polic": "keep"}),))
    assert _errors(doctor(bad)) == [("config", "rules: connection_rules[1]: unknown key 'polic'")]


def test_rules_whose_secret_more_may_get_than_was_meant(config: Config) -> None:
    def rule(**match: Any) -> Config:
        made = {"match": match, "secret": {"env": "PW"}}
        return replace(config, connection_rules=(("rules: connection_rules[1]", made),))

    assert (
        "only connections of root get"
        in _finding(doctor(rule(process="worker*")), "rule-secret").text
    )
    assert "any user" in _finding(doctor(rule(host="db.example.org")), "rule-secret").text
    named = doctor(rule(host="db.example.org", user=["root", "nobody-here"]))
    assert _finding(named, "rule-user").level == "warning" and not [
        f for f in named if f.code == "rule-secret"
    ]


def test_store_with_its_key(config: Config) -> None:
    store = open_store(config.store, config)
    Repository.init(store, encryption=True, key_file=None, passphrase=None, config=config)
    store.close()
    found = doctor(config)
    assert _errors(found) == []
    assert "encrypted" in _finding(found, "store").text
    for key in Path(config.key_dir).iterdir():
        key.unlink()
    assert [code for code, _text in _errors(doctor(config))] == ["key-missing"]


def test_store_that_cannot_be_reached(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someKey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    found = doctor(replace(config, store="s3://bucket/prefix"))
    assert [code for code, _text in _errors(found)] == ["store-unreachable"]
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    ("criu", "words"), [("/proc/nonexistent/criu", "not an executable"), ("/bin/true", "")]
)
def test_criu_that_is_none(config: Config, criu: str, words: str) -> None:
    found = doctor(replace(config, criu=criu))
    codes = [code for code, _text in _errors(found)]
    assert codes
    assert words in _errors(found)[0][1]
    assert versions(replace(config, criu=criu))["criu"] is None


def test_folders_that_cannot_be_written(config: Config) -> None:
    found = _errors(doctor(replace(config, state_dir="/proc/criuctl", cache_dir="/sys/criuctl")))
    assert [code for code, _text in found] == ["platform", "platform"]
    assert "state_dir /proc/criuctl" in found[0][1]


def test_others_may_not_write(config: Config, tmp_path: Path) -> None:
    source = tmp_path / "config.yaml"
    source.touch()
    source.chmod(0o666)
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    found = doctor(replace(config, sources=(str(source),)))
    assert str(source) in _finding(found, "config-mode").text
    assert str(tmp_path / "state") in _finding(found, "folder-mode").text


def test_criu_configuration_of_the_host_is_reported(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".criu").mkdir()
    (tmp_path / ".criu" / "default.conf").write_text("leave-running\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(tmp_path / ".criu" / "default.conf") in _finding(doctor(config), "criu-config").text


def test_versions(config: Config) -> None:
    body = versions(config)
    assert body["kernel"] == os.uname().release
    assert body["criu"]["version"].split(".")[0].isdigit()
    assert body["formats"]["writes"] in body["formats"]["reads"]

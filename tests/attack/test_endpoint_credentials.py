"""Credentials that stand in an address are repeated nowhere: not in errors, warnings, JSON, logs,
events or reports.

Each case plants a canary in an address that criuctl is given, runs the commands that fail, warn or
report because of it, and looks through all that they printed and all files that they left.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from servers.rclone import RcloneServer
from support.command import Command, Criuctl, Home
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

CANARY = "canary5cd1"
# The credentials as people write them: encoded or not, as user or password, with a slash, a query.
ADDRESSES = {
    "user and password": f"http://AKIA:{CANARY}@127.0.0.1:9",
    "user alone": f"http://{CANARY}@127.0.0.1:9",
    "password with a slash": f"http://AKIA:ab/{CANARY}@127.0.0.1:9",
    "password with a slash behind": f"http://AKIA:{CANARY}/x@127.0.0.1:9",
    "password with a blank": f"http://AKIA:{CANARY} {CANARY}@127.0.0.1:9",
    "password with odd characters": f"http://AKIA:a@b#c?{CANARY}@127.0.0.1:9",
    "in the query": f"http://127.0.0.1:9/?X-Amz-Signature={CANARY}&x=1",
    "over https, upper case": f"HTTPS://AKIA:{CANARY}@127.0.0.1:9/path",
}
COMMANDS = (  # with --json, or for people
    (True, "-v", "list"),
    (False, "-vv", "show", "work"),
    (False, "store", "init"),
    (False, "doctor"),
    (True, "doctor"),
    (False, "doctor", "--report"),
    (True, "events"),
    (False, "config", "show"),
)


def leaked(home: Home) -> list[str]:
    """The files of this test, outputs included, in which the canary is."""
    found = [
        path for folder in (home.path, home.run) for path in folder.rglob("*") if path.is_file()
    ]
    return [
        str(path) for path in found if CANARY.encode() in path.read_bytes() or CANARY in path.name
    ]


def ran(criuctl: Criuctl, animal: Animal) -> list[Command]:
    """All commands, one after the other, with a dump among them; some fail."""
    done = []
    for as_json, *words in (
        (False, "dump", str(animal.pid)),
        (True, "-v", "dump", str(animal.pid)),
        *COMMANDS,
    ):
        done.append(criuctl.start(*words, json_output=as_json))
        done[-1].process.wait(120)
    return done


@pytest.mark.parametrize(
    ("variable", "address"),
    [
        *(("CRIUCTL_S3_ENDPOINT", one) for one in ADDRESSES.values()),
        ("AWS_ENDPOINT_URL", ADDRESSES["user and password"]),
    ],
    ids=[*ADDRESSES, "found by boto3"],
)
def test_an_endpoint_s_credentials_are_not_repeated(
    variable: str, address: str, criuctl: Criuctl, home: Home, zoo: Zoo
) -> None:
    criuctl.extra = {
        "CRIUCTL_STORE": "s3://bucket/prefix",
        "CRIUCTL_S3_RETRIES": "1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        variable: address,
    }
    animal = zoo.launch("counter.py")
    done = ran(criuctl, animal)
    assert any(
        b"endpoint" in command.err.read_bytes() + command.out.read_bytes() for command in done
    )
    assert leaked(home) == []


def test_nothing_that_is_stored_or_recorded_holds_the_endpoint_s_credentials(
    rclone_server: RcloneServer, criuctl: Criuctl, home: Home, zoo: Zoo
) -> None:
    """A server that is reached by such an address: manifests, records of the host, results and the
    bucket do not have them.
    """
    rclone_server.make_bucket(home.token)
    criuctl.extra = {**rclone_server.env, "CRIUCTL_STORE": f"s3://{home.token}/x"}
    criuctl.extra["CRIUCTL_S3_ENDPOINT"] = rclone_server.endpoint.replace(
        "://", f"://user:{CANARY}@"
    )
    assert not criuctl("store", "init", "--no-encrypt")["encrypted"]
    animal = zoo.launch("counter.py")
    report = criuctl("dump", animal.pid, "--name", "work")
    restored = zoo.adopt(criuctl("restore", "work")["pid"], animal)
    for words in (
        ("list",),
        ("show", "work"),
        ("store", "info"),
        ("status", "work"),
        ("events",),
        ("doctor",),
    ):
        criuctl("-v", *words, check=False)
    criuctl("export", "work", home.path / "exported")
    restored.end()
    assert leaked(home) == []
    client = rclone_server.client()
    keys = rclone_server.keys(home.token)
    assert any(report["checkpoint"] in key for key in keys)
    assert [
        key
        for key in keys
        if CANARY.encode() in client.get_object(Bucket=home.token, Key=key)["Body"].read()
    ] == []


STORES = (
    f"https://AKIA:{CANARY}@s3.example.org/bucket",
    f"s3://AKIA:{CANARY}@bucket/prefix",
    f"s3:///AKIA:{CANARY}@bucket",
    f"file://user:{CANARY}@host/folder",
    f"ftp://user:{CANARY}@host/folder",
    f"http://host/?token={CANARY}",
)


@pytest.mark.parametrize("store", STORES)
def test_a_store_s_credentials_are_not_repeated(
    store: str, criuctl: Criuctl, home: Home, zoo: Zoo
) -> None:
    criuctl.extra = {"CRIUCTL_STORE": store}
    ran(criuctl, zoo.launch("counter.py"))
    assert leaked(home) == []


def test_a_host_s_password_is_not_repeated(criuctl: Criuctl, home: Home, zoo: Zoo) -> None:
    """ssh takes none, so such an address is an error, which does not repeat it."""
    animal = zoo.launch("counter.py")
    for address in (f"ssh://root:{CANARY}@127.0.0.1", f"ssh://root:a/{CANARY}@127.0.0.1:22"):
        for as_json in (True, False):
            command = criuctl.start("migrate", str(animal.pid), address, json_output=as_json)
            assert command.process.wait(60) == 2
    configured = home.path / "config.yaml"
    configured.write_text(f"hosts: {{there: {{url: 'ssh://root:{CANARY}@127.0.0.1'}}}}\n")
    command = criuctl.start("--config", configured, "migrate", str(animal.pid), "there")
    assert command.process.wait(60) == 2
    configured.unlink()
    assert leaked(home) == []


def test_a_secret_in_a_passphrase_command_is_not_repeated(criuctl: Criuctl, home: Home) -> None:
    """Its words may be telling, and so may what it prints."""
    criuctl("store", "init", "--passphrase", env={"CRIUCTL_PASSPHRASE": "x"})
    for words in (
        f"{sys.executable} -c 'raise SystemExit(\"{CANARY}\")'",
        f"/nonexistent/program {CANARY}",
        f"echo '{CANARY}",
    ):
        for as_json in (True, False):
            command = criuctl.start(
                "-vv", "list", json_output=as_json, env={"CRIUCTL_PASSPHRASE_COMMAND": words}
            )
            assert command.process.wait(60) in (2, 7, 8, 13)
    assert leaked(home) == []


def test_the_search_finds_what_is_there(home: Home) -> None:
    (home.path / "x").write_text(f"a{CANARY}b")
    assert leaked(home) == [str(home.path / "x")]
    Path(home.path / "x").unlink()

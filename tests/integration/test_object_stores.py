"""The main job against real S3 servers: there and back, encrypted by default, nothing of the memory
readable in the bucket.
"""

from __future__ import annotations

import pytest
from servers.common import S3Server
from servers.radosgw import RadosGateway
from support.command import Criuctl, Home
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

CANARY = "canary-6b1f-secret-token"


@pytest.fixture(params=["radosgw", "rclone"])
def server(request: pytest.FixtureRequest, home: Home, criuctl: Criuctl) -> S3Server:
    """A server with a bucket of this test's own; criuctl is set to use it."""
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    server.make_bucket(home.token)
    criuctl.extra |= {**server.env, "CRIUCTL_STORE": f"s3://{home.token}/some/prefix"}
    return server


def test_there_and_back(
    server: S3Server, home: Home, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """A tree with a secret in memory, environment and files: all equal; none of it is readable in
    the bucket.
    """
    criuctl("store", "init")
    info = criuctl("store", "info")
    assert "encrypt" in str(info).lower()
    animal = zoo.launch("memory.py", "8", env={"TOKEN": CANARY})
    (animal.folder / "notes").write_text(f"{CANARY}\n" * 100)
    report = trip.dump(animal, "--with-files", animal.folder / "notes", "--name", "in-the-cloud")
    assert report["store"] == f"s3://{home.token}/some/prefix"
    assert [row["id"] for row in criuctl("list")] == [report["checkpoint"]]
    criuctl("verify", "--all")
    client = server.client()
    keys = server.keys(home.token)
    assert keys
    for key in keys:
        body = client.get_object(Bucket=home.token, Key=key)["Body"].read()
        for secret in (CANARY, "memory.py", str(home.path), "in-the-cloud"):
            assert secret.encode() not in body, f"{secret} is readable in {key}"
            assert secret not in key
    assert server.multipart_uploads(home.token) == []
    restored = trip.restore(report, animal)
    restored.ask()
    again = trip.restore(trip.dump(restored), restored)
    again.ask()
    criuctl("rm", "in-the-cloud@1")
    assert len(criuctl("list")) == 1


def test_what_is_known_already_is_not_sent_again(
    server: S3Server, home: Home, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """A second dump of an unchanged tree stores almost nothing."""
    criuctl("store", "init")
    animal = zoo.launch("memory.py", "32")
    first, second = trip.snapshot(animal), trip.snapshot(animal)
    assert first["bytes"]["stored"] > 20 << 20
    assert second["bytes"]["stored"] < first["bytes"]["stored"] / 20


def test_five_different_refusals(
    radosgw_server: RadosGateway, home: Home, zoo: Zoo, criuctl: Criuctl
) -> None:
    """Unreachable, denied, no bucket, no store in it, no key: five errors, each before the tree is
    frozen.
    """
    radosgw_server.make_bucket(home.token)
    base = {
        **radosgw_server.env,
        "CRIUCTL_STORE": f"s3://{home.token}/x",
        "CRIUCTL_S3_RETRIES": "2",
    }
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    codes = {}

    def refused(name: str, exit_code: int, **changes: str) -> None:
        criuctl.extra = base | changes
        answer = criuctl("dump", animal.pid, check=False)
        assert answer["exit_code"] == exit_code, answer
        assert answer["error"]["hint"], answer
        codes[name] = answer["error"]["code"]

    refused("not initialised", 7)
    refused("unreachable", 7, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    refused("wrong secret", 7, AWS_SECRET_ACCESS_KEY="wrong")
    refused("no bucket", 7, CRIUCTL_STORE=f"s3://{home.token}-not/x")
    criuctl.extra = base
    criuctl("store", "init")
    refused("no key", 7, CRIUCTL_KEY_DIR=str(home.path / "no-keys"))
    criuctl.extra = base | {"CRIUCTL_STORE": f"s3://{home.token}/other"}
    criuctl("store", "init")
    keys = sorted((home.path / "keys").iterdir(), key=lambda path: path.stat().st_mtime)
    refused("wrong key", 8, CRIUCTL_KEY_FILE=str(keys[-1]))
    assert len(set(codes.values())) == len(codes), codes
    assert animal.differences(animal) == []
    animal.ask()


NO_SERVER = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "CRIUCTL_STORE": "s3://bucket/prefix/",
    "CRIUCTL_S3_RETRIES": "1",
}


@pytest.mark.parametrize(
    "surroundings",
    [
        "true",
        "ulimit -n 24",
        "ulimit -n 60",
        "ulimit -v 250000",
        "ulimit -v 600000",
        "exec 0<&-",
        "exec 0<&- 2>&-",
    ],
)
def test_where_there_is_no_room_for_a_process_that_speaks_to_the_store(
    surroundings: str, criuctl: Criuctl
) -> None:
    """criuctl does without it, or with less of it: errors are reported as ever."""
    criuctl.extra |= {**NO_SERVER, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    criuctl.prefix = ["sh", "-c", f'{surroundings}; exec "$@"', "sh"]
    answer = criuctl("restore", "web", check=False)
    assert (answer["exit_code"], answer["error"]["code"], answer["stderr"]) == (
        7,
        "store-unreachable",
        "",
    )
    assert (
        "reading config in s3://bucket/prefix at http://127.0.0.1:9: no answer"
        in answer["error"]["message"]
    )


def test_the_cause_of_an_error_is_reported(criuctl: Criuctl) -> None:
    criuctl.extra |= {**NO_SERVER, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    command = criuctl.start("restore", "web", "-v", json_output=False)
    assert command.process.wait(60) == 7
    assert "caused by: EndpointConnectionError: Could not connect" in command.err.read_text()


def test_with_closed_standard_streams(
    server: S3Server, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """Standard streams that are closed are not what the process that speaks to the store is spoken
    to by.
    """
    criuctl("store", "init")
    animal = zoo.launch("memory.py", "8")
    criuctl.prefix = ["sh", "-c", 'exec 0<&- 2>&-; exec "$@"', "sh"]
    restored = trip.restore(trip.dump(animal), animal)
    restored.ask()

"""The notices of three clouds, by their real protocols."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers.metadata import CloudMetadata, metadata_service

from criuctl.errors import UsageError
from criuctl.ops.spot.aws import Aws
from criuctl.ops.spot.azure import Azure
from criuctl.ops.spot.clouds import chosen
from criuctl.ops.spot.metadata import Metadata, MetadataUnavailable
from criuctl.ops.spot.notices import Notice, moment, object_in

CLOUDS = ("aws", "gcp", "azure")


@pytest.fixture(params=CLOUDS)
def service(request: pytest.FixtureRequest) -> Iterator[CloudMetadata]:
    with metadata_service(request.param) as service:
        yield service


def test_an_interruption_is_seen_and_withdrawn(service: CloudMetadata) -> None:
    cloud = chosen("auto", service.url)
    assert cloud.name == service.cloud
    assert cloud.look() is None
    service.interrupt(100)
    notice = cloud.look()
    assert notice is not None and notice.kind == "interruption"
    assert cloud.look() == notice, "the same one while it stands"
    expected = 30 if service.cloud == "gcp" else 100  # gcp names no time
    assert expected - 10 < notice.left(time.time()) <= expected
    service.withdraw()
    assert cloud.look() is None


def test_a_token_that_has_expired_is_replaced() -> None:
    with metadata_service("aws") as service:
        cloud = Aws(Metadata.at(service.url))
        assert cloud.look() is None
        assert service.tokens == 1, "one token serves many requests"
        service.expire()
        service.interrupt(100)
        assert cloud.look() is not None
        assert service.tokens == 2


def test_a_recommendation_has_no_time() -> None:
    with metadata_service("aws") as service:
        cloud = chosen("aws", service.url)
        service.recommend()
        notice = cloud.look()
        assert notice is not None and (notice.kind, notice.at) == ("rebalance", None)
        service.interrupt(100)
        notice = cloud.look()
        assert notice is not None and notice.kind == "interruption", "which is more urgent"


def test_a_preemption_ends_the_wait_for_it() -> None:
    """The look does not come back after its pause, but when the value changes."""
    with metadata_service("gcp") as service:
        cloud = chosen("gcp", service.url)
        assert cloud.look() is None
        service.interrupt(30)
        before = time.monotonic()
        assert cloud.look() is not None
        assert time.monotonic() - before < 4.5
        assert "wait_for_change=true&last_etag=1" in service.requests[-1]


@pytest.mark.parametrize(
    ("event", "seen"),
    [("MIGRATE_ON_HOST_MAINTENANCE", False), ("TERMINATE_ON_HOST_MAINTENANCE", True)],
)
def test_maintenance_of_a_host_of_google_s(event: str, seen: bool) -> None:
    with metadata_service("gcp") as service:
        service.maintain(event)
        notice = chosen("gcp", service.url).look()
        assert (notice is not None and notice.window == 60.0) == seen


def test_events_of_other_machines_and_of_several() -> None:
    """Only an event of this machine counts, and only one of this machine alone is acknowledged."""
    with metadata_service("azure") as service:
        cloud = Azure(Metadata.at(service.url))
        service.interrupt(60, resources=("machine-2",))
        assert cloud.look() is None
        service.events[0]["EventType"] = "Freeze"
        service.events[0]["Resources"] = ["machine-1"]
        assert cloud.look() is None, "memory outlives it"
        service.interrupt(60, resources=("MACHINE-1", "machine-2"))
        notice = cloud.look()
        assert notice is not None and notice.id == "event-2"
        assert cloud.acknowledge(notice) is False
        service.interrupt(20)
        notice = cloud.look()
        assert notice is not None and notice.id == "event-3", "the next one first"
        assert cloud.acknowledge(notice) is True
        assert service.started == ["event-3"]


def test_a_time_that_has_passed_by_this_clock_counts_for_nothing() -> None:
    notice = Notice("aws", "interruption", "1", "stop", 120.0, at=1000.0)
    assert (notice.left(900.0), notice.left(1000.0), notice.left(5000.0)) == (100.0, 120.0, 120.0)


def test_times() -> None:
    assert moment("2017-09-18T08:22:00Z") == 1505722920.0
    assert moment("Mon, 18 Sep 2017 08:22:00 GMT") == 1505722920.0
    for wrong in ("", "soon", None, 7, "9999-99-99T00:00:00Z", "x" * 1000):
        assert moment(wrong) is None


@given(st.text(max_size=60))
def test_any_text_for_a_time(text: str) -> None:
    found = moment(text)
    assert found is None or isinstance(found, float)


def test_deep_documents() -> None:
    with pytest.raises(MetadataUnavailable):
        object_in("[" * 100_000, "events")


@pytest.mark.parametrize(
    "url", ["https://169.254.169.254", "169.254.169.254", "http://h:x", "http://h/p", ""]
)
def test_addresses(url: str) -> None:
    with pytest.raises(UsageError):
        Metadata.at(url)

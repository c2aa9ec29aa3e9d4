"""A metadata service that is none: what answers on the link-local address keeps a watch neither
busy nor waiting, and what it says is no notice unless it is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from servers.metadata import CloudMetadata, metadata_service

from criuctl.errors import UsageError
from criuctl.ops.spot.clouds import chosen
from criuctl.ops.spot.metadata import Metadata, MetadataUnavailable


@pytest.fixture(params=["aws", "gcp", "azure"])
def service(request: pytest.FixtureRequest) -> Iterator[CloudMetadata]:
    with metadata_service(request.param) as service:
        yield service


@pytest.mark.parametrize("harm", ["huge", "drip", "hang", "redirect", "garbage", "error"])
def test_a_service_that_is_none(
    service: CloudMetadata, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unavailable, within its time; nothing is taken for a notice."""
    asked = Metadata.ask
    monkeypatch.setattr(
        Metadata,
        "ask",
        lambda self, path, **options: asked(self, path, **options | {"seconds": 0.4}),
    )
    cloud = chosen(service.cloud, service.url)
    service.harm = harm
    before = time.monotonic()
    with pytest.raises(MetadataUnavailable):
        cloud.look()
    assert time.monotonic() - before < 10
    assert "elsewhere" not in str(service.requests)
    if harm not in ("hang", "drip"):  # each cloud would wait for its time
        with pytest.raises(UsageError, match="no cloud's metadata service"):
            chosen("auto", service.url)


def test_documents_that_make_no_sense() -> None:
    with metadata_service("aws") as service:
        cloud = chosen("aws", service.url)
        service.documents["spot/instance-action"] = "[1]"
        with pytest.raises(MetadataUnavailable):
            cloud.look()
        # a notice whose details cannot be read is a notice
        service.documents["spot/instance-action"] = '{"action": "\\u001b[2J", "time": {}}'
        notice = cloud.look()
        assert notice is not None
        assert (notice.action, notice.at, notice.left(0)) == ("terminate", None, 120.0)
    with metadata_service("azure") as service:
        cloud = chosen("azure", service.url)
        service.events += [{"EventType": "Preempt", "Resources": 7}, {"EventType": ["Preempt"]}]
        assert cloud.look() is None

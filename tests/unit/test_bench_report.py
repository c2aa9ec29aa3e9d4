"""The bench's verdicts: what each kind of bound compares."""

from __future__ import annotations

import pytest
from bench.report import Bound, Row


@pytest.mark.parametrize(
    ("bound", "own", "peer", "verdict"),
    [
        (Bound(2), 1.5, 9.0, (1.5, True)),
        (Bound(2), 2.5, 9.0, (2.5, False)),
        (Bound(0.5, "peer"), 4.0, 8.0, (0.5, True)),
        (Bound(0.5, "peer"), 4.0, 7.0, (4 / 7, False)),
        (Bound(1, "peer", "above"), 8.5, 8.0, (0.5, True)),
        (Bound(1, "peer", "above"), 9.5, 8.0, (1.5, False)),
        (Bound(200, "peer", "least"), 201.0, 500.0, (201.0, True)),
        (Bound(200, "peer", "least"), 199.0, 500.0, (199.0, False)),
        (Bound(200, "peer", "least"), 150.0, 140.0, (150.0, True)),  # there is no more
        (Bound(200, "peer", "least"), 130.0, 140.0, (130.0, False)),
    ],
)
def test_verdict(bound: Bound, own: float, peer: float, verdict: tuple[float, bool]) -> None:
    row = Row("what", "MB/s", bound, {"criuctl": [own], "peer": [peer]})
    assert row.verdict() == verdict


def test_without_the_peer_there_is_no_verdict() -> None:
    assert Row("what", "s", Bound(1, "peer", "above"), {"criuctl": [1.0]}).verdict() is None
    assert Row("what", "s", Bound(1, of="client"), {"criuctl": [1.0]}).verdict() is None

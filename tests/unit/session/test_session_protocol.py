"""Frames and versions: any cut of the stream gives the same frames, nonsense is an error, lengths
are bounded.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criuctl.session import protocol
from criuctl.session.protocol import Decoder, ProtocolError


@settings(max_examples=100, deadline=None)
@given(bodies=st.lists(st.binary(max_size=300), max_size=8), cut=st.integers(1, 50))
def test_frames_survive_any_cut(bodies: list[bytes], cut: int) -> None:
    stream = protocol.preface("test/1") + b"".join(
        protocol.input_frame(i + 1, body) for i, body in enumerate(bodies)
    )
    decoder, found = Decoder(), []
    for at in range(0, len(stream), cut):
        decoder.feed(stream[at : at + cut])
        found += [
            protocol.parse_input(body) for kind, body in decoder.frames() if kind == protocol.INPUT
        ]
    assert found == [(i + 1, body) for i, body in enumerate(bodies)]
    assert decoder.version == protocol.VERSION and decoder.held == b""


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1",
        b"criuctl-session",
        b"criuctl-session 1",
        b"criuctl-session x 1 p",
        b"\xff\xfe 1 1 p",
    ],
)
def test_others_are_recognised(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not speak"):
        protocol.common_version(line)


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [((1, 3), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 4), (1, 1), None), ((1, 1), (2, 4), None)],
)
def test_both_speak_the_newest_that_both_know(
    ours: tuple[int, int], theirs: tuple[int, int], common: int | None
) -> None:
    line = protocol.preface("other/9", *theirs).rstrip(b"\n")
    if common is None:
        with pytest.raises(ProtocolError, match="no common protocol version"):
            protocol.common_version(line, *ours)
    else:
        assert protocol.common_version(line, *ours) == common


@pytest.mark.parametrize(
    "stream",
    [b"\0\0\0\0J", b"\xff\xff\xff\xffJ", (protocol.MAX_FRAME + 1).to_bytes(4, "big") + b"J"],
)
def test_lengths_are_bounded_before_anything_is_kept(stream: bytes) -> None:
    decoder = Decoder()
    decoder.feed(protocol.preface("test/1") + stream)
    with pytest.raises(ProtocolError):
        list(decoder.frames())


def test_a_first_line_without_end_is_refused() -> None:
    decoder = Decoder()
    decoder.feed(b"x" * protocol.MAX_PREFACE)
    with pytest.raises(ProtocolError):
        list(decoder.frames())


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_messages_are_json_objects(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.parse_json(body)

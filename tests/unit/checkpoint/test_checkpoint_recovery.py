"""A recovery key's text: what is typed is understood however it is spaced, and an error is found
where it was made.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.checkpoint import key_files, recovery
from criuctl.errors import WrongKey

secrets = st.binary(min_size=20, max_size=20)
places = st.integers(0, 47)


def groups_of(error: WrongKey) -> set[int]:
    """Those that the message names as wrong."""
    return {int(number) for number in re.findall(r"\d+", error.message.partition("mistyped: ")[2])}


def refused(text: str) -> WrongKey:
    with pytest.raises(WrongKey, match="mistyped") as caught:
        recovery.from_text(text, "paper")
    words = {word for word in re.split(r"[^A-Z]+", text.upper()) if len(word) > 3}
    assert not [word for word in words if word in caught.value.message + caught.value.hint]
    return caught.value


@given(secrets, st.sampled_from(["-", " ", "\n", " - ", ""]), st.booleans())
def test_what_is_written_down_is_read(secret: bytes, between: str, lower: bool) -> None:
    text = recovery.to_text(secret)
    assert re.fullmatch(r"([A-HJKMNP-Z]{6}-){7}[A-HJKMNP-Z]{6}", text)
    typed = f" {text.replace('-', between)}\n"
    assert recovery.from_text(typed.lower() if lower else typed, "paper") == secret
    assert key_files.KeyText.parse(typed.strip().encode(), "paper") == key_files.KeyText(
        secret, recovery=True
    )


@given(secrets, places, st.sampled_from(recovery.LETTERS))
def test_a_wrong_letter_is_reported_with_its_group(secret: bytes, place: int, letter: str) -> None:
    text = recovery.to_text(secret).replace("-", "")
    wrong = text[:place] + letter + text[place + 1 :]
    if wrong != text:
        assert groups_of(refused(wrong)) == {place // 6 + 1}


@given(secrets, st.integers(0, 46))
def test_swapped_neighbours_are_reported_with_their_groups(secret: bytes, place: int) -> None:
    text = recovery.to_text(secret).replace("-", "")
    if text[place] != text[place + 1]:
        wrong = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
        assert groups_of(refused(wrong)) == {place // 6 + 1, (place + 1) // 6 + 1}


@given(secrets, st.integers(0, 7), st.integers(0, 7))
def test_swapped_groups_are_reported(secret: bytes, one: int, other: int) -> None:
    groups = recovery.to_text(secret).split("-")
    groups[one], groups[other] = groups[other], groups[one]
    if one != other and groups[one] != groups[other]:
        assert {one + 1, other + 1} <= groups_of(refused("-".join(groups)))


@given(secrets, st.integers(0, 7), st.sampled_from(["", "A", "AA"]))
def test_a_group_of_another_length_is_reported(secret: bytes, group: int, more: str) -> None:
    groups = recovery.to_text(secret).split("-")
    groups[group] = groups[group][:5] + more if more else groups[group][:5]
    if len(groups[group]) != 6:
        assert (
            f"group {group + 1} has {len(groups[group])} letters"
            in refused(" ".join(groups)).message
        )
        assert "letters, not 48" in refused("".join(groups)).message


@given(secrets, st.integers(0, 7), st.sampled_from("ilO01!é"))
def test_a_character_outside_the_alphabet_is_reported(
    secret: bytes, group: int, character: str
) -> None:
    groups = recovery.to_text(secret).split("-")
    groups[group] = groups[group][:2] + character + groups[group][3:]
    assert f"character 3 of group {group + 1}" in refused("-".join(groups)).message


def test_groups_of_two_keys_do_not_belong_together() -> None:
    one, other = (recovery.to_text(bytes([number] * 20)).split("-") for number in (1, 2))
    assert "belong together" in refused("-".join(one[:4] + other[4:])).message
    # The largest text of all is no number of 22 bytes.
    letters = [22] * 5
    largest = "-".join(
        "Z" * 5
        + recovery.LETTERS[(sum((i + 1) * v for i, v in enumerate(letters)) + 7 * (group + 1)) % 23]
        for group in range(8)
    )
    assert "belong together" in refused(largest).message
    for text in ("", "Z"):
        assert "letters, not 48" in refused(text).message

"""Looking into a checkpoint of a real tree: what its manifest does not tell."""

from __future__ import annotations

import pytest
from support.command import Criuctl
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def test_environments_are_read_from_memory_and_values_are_masked_by_default(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    animal = zoo.launch("counter.py", env={"API_KEY": "s3cret=\x1b[2J", "LONG": "x" * 70_000})
    trip.snapshot(animal, "--name", "web")
    masked = criuctl("show", "web", "--env")
    variables = {v["name"]: v["value"] for v in masked["environments"][0]["variables"]}
    assert masked["environments"][0]["pid"] == animal.pid
    assert {"API_KEY", "LONG", "PATH"} <= set(variables)
    assert set(variables.values()) == {None}
    assert "environments" not in criuctl("show", "web")
    values = {
        v["name"]: v["value"]
        for v in criuctl("show", "web", "--env", "--values")["environments"][0]["variables"]
    }
    assert (values["API_KEY"], values["LONG"]) == ("s3cret=\x1b[2J", "x" * 70_000)
    assert values.keys() == variables.keys()
    for options, words in (
        (("--env",), "  API_KEY=***\n"),
        (("--env", "--values"), "  API_KEY=s3cret=\\x1b[2J\n"),
    ):
        command = criuctl.start("show", "web", *options, json_output=False)
        assert command.process.wait(60) == 0
        assert words in command.out.read_text()
    assert criuctl("show", "web", "--values", check=False)["exit_code"] == 2

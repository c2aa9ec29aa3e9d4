"""What a session inherits of its caller's environment."""

from __future__ import annotations

import pytest

from criuctl.config import Config
from criuctl.ops.environment import credentials, for_terminal, inherited


def test_plain_settings_go_on_and_all_else_of_criuctl_s_stays() -> None:
    plain = {
        "PATH": "/bin",
        "AWS_SECRET_ACCESS_KEY": "x",
        "CRIUCTL_STORE": "/srv/store",
        "CRIUCTL_RUN_DIR": "/run/c",
        "CRIUCTL_S3_ENDPOINT": "https://s3.example.org:9000",
        "CRIUCTL_COMPRESSION": "3",
        "CRIUCTL_CONNECTIONS": "keep",
        "CRIUCTL_OPERATOR": "ann",
        "CRIUCTL_KIND": "agent",
    }
    private = {
        "CRIUCTL_PASSPHRASE": "x",
        "CRIUCTL_RECOVERY_KEY": "x",
        "CRIUCTL_KEY_FILE": "/k",
        "CRIUCTL_PASSPHRASE_FILE": "/p",
        "CRIUCTL_PASSPHRASE_COMMAND": "pass show x",
        "CRIUCTL_PROBES": "{}",
        "CRIUCTL_CONNECTION_RULES": "[]",
        "CRIUCTL_ANY_OTHER": "x",
        "CRIUCTL_SESSION": "outer",
        "CRIUCTL_SESSION_ID": "x",
        "CRIUCTL_ROLE": "observe",
    }
    assert inherited(plain | private) == plain
    assert inherited({"CRIUCTL_KIND": "human"}) == {}  # what it runs is not the person


def test_the_window_that_it_was_started_in_is_not_the_session_s() -> None:
    window = dict.fromkeys(("TMUX", "TMUX_PANE", "STY", "WINDOWID", "LINES", "COLUMNS"), "1")
    assert inherited(window | {"TERM": "tmux-256color"}) == {"TERM": "tmux-256color"}


@pytest.mark.parametrize(
    ("term", "gets"),
    [
        (None, "xterm-256color"),
        ("", "xterm-256color"),
        ("dumb", "xterm-256color"),
        ("tmux", "tmux"),
    ],
)
def test_a_session_that_is_shown_nowhere_has_a_terminal_type(term: str | None, gets: str) -> None:
    before = {"A": "b"} if term is None else {"A": "b", "TERM": term}
    assert for_terminal(before) == {"A": "b", "TERM": gets}


def test_a_plain_setting_with_a_login_in_it_stays() -> None:
    assert inherited({"CRIUCTL_S3_ENDPOINT": "https://u:p@host", "CRIUCTL_STORE": "s3://b/x"}) == {
        "CRIUCTL_STORE": "s3://b/x"
    }


@pytest.mark.parametrize(
    ("store", "reported"), [("s3://bucket/x", True), ("S3://bucket", True), ("/srv/store", False)]
)
def test_the_store_s_credentials_are_named_where_it_is_on_s3(store: str, reported: bool) -> None:
    environ = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_SESSION_TOKEN": "x",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": "x",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/f",
        "AWS_REGION": "x",
        "MY_SECRET": "x",
    }
    wanted = ["AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
    assert credentials(environ, Config(store=store)) == (wanted if reported else [])
    assert credentials({"AWS_SECRET_ACCESS_KEY": ""}, Config(store=store)) == []

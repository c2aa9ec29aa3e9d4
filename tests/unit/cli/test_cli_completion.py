"""Shell completion: the scripts, and what bash is answered."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.program import clean_environment

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_valid_in_its_shell(criuctl: Run, tmp_path: Path, shell: str) -> None:
    done = criuctl("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_CRIUCTL_COMPLETE" in done.stdout
    script = tmp_path / "script"
    script.write_text(done.stdout)
    # bash is required, the others are checked where they are installed
    if shutil.which(shell) or shell == "bash":
        subprocess.run([shell, "-n", str(script)], check=True, timeout=120)


def test_fish_gets_whole_descriptions(criuctl: Run, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(criuctl("completion", "fish").stdout)
    program = tmp_path / "criuctl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m criuctl "$@"\n')
    program.chmod(0o755)
    asked = [
        "fish",
        "--no-config",
        "-c",
        f"set -p PATH {tmp_path}; source {script}; complete -C 'criuctl recov'",
    ]
    done = subprocess.run(
        asked,
        env=clean_environment(HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "recover\tRestore sessions at a boot.\n"


@pytest.fixture
def complete(criuctl: Run, tmp_path: Path) -> Callable[..., list[str]]:
    """What bash would offer for the line typed so far, with bash's own ideas of where words end."""
    script = tmp_path / "completion"
    script.write_text(criuctl("completion", "bash").stdout)
    program = tmp_path / "criuctl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m criuctl "$@"\n')
    program.chmod(0o755)

    def ask(line: str, breaks: str = " \t\n\"'@><=;|&(:", **env: str) -> list[str]:
        source = (
            f"source {script}; COMP_WORDBREAKS=$1; COMP_LINE=$2; COMP_POINT=${{#COMP_LINE}}; "
            f'_criuctl_completion {program}; [ ${{#COMPREPLY[@]}} = 0 ] || printf "%s\\n" '
            f'"${{COMPREPLY[@]}}"'
        )
        done = subprocess.run(
            ["bash", "-c", source, "bash", breaks, line],
            env=clean_environment(**env),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    return ask


def test_commands_options_and_choices(complete: Callable[..., list[str]]) -> None:
    assert complete("criuctl s") == [
        "status",
        "send",
        "share",
        "signal",
        "step",
        "snapshot",
        "schedule",
        "supervise",
        "slurm",
        "show",
        "store",
    ]
    assert complete("criuctl store in") == ["init", "info"]
    assert complete("criuctl dump --lea") == ["--leave-running"]
    assert complete("criuctl dump --connections ") == ["keep", "reconnect", "hangup", "refuse"]
    assert complete("criuctl dump --connections=h") == ["hangup"]
    assert "--json" in complete("criuctl store info --")


def test_pids_once_a_digit_is_typed(complete: Callable[..., list[str]]) -> None:
    assert complete("criuctl dump ", CRIUCTL_STATE_DIR="/proc/nonexistent") == []
    assert "1" in complete("criuctl dump 1")


def test_no_store_completes_nothing_and_says_nothing(complete: Callable[..., list[str]]) -> None:
    assert complete("criuctl restore ", CRIUCTL_STORE="/proc/nonexistent/store") == []
    assert (
        complete(
            "criuctl show ",
            CRIUCTL_STORE="s3://nowhere/x",
            CRIUCTL_S3_ENDPOINT="http://127.0.0.1:9",
        )
        == []
    )
    assert complete("criuctl show ", CRIUCTL_STORE="nonsense://") == []
    assert complete("criuctl --config /proc/nonexistent show ") == []

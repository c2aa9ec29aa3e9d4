"""Parts of set-up and of the quickstart, on hosts that are not as they should be: behind a proxy,
after a killed set-up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def shell(program: str, *arguments: str | Path, **environment: str | Path) -> str:
    """What a program prints that has the parts of set-up."""
    parts = "".join(
        f'. "{SCRIPTS}/lib/{name}.sh"; ' for name in ("common", "packages", "criu", "python")
    )
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    command = ["sh", "-c", f"set -eu; {parts}{program}", "sh", *map(str, arguments)]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def made_by(python: str, folder: Path) -> str:
    """Whether set-up makes the environment in `folder` again."""
    fake = folder.parent / "python3"
    fake.write_text(f'#!/bin/sh\ncase $2 in venv) echo anew ;; *) exec "{python}" "$@" ;; esac\n')
    fake.chmod(0o755)
    return shell('python=$2; quietly() { "$@"; }; say() { :; }; fresh_venv "$1"', folder, fake)


def test_a_half_made_environment_is_made_again(tmp_path: Path) -> None:
    """pip comes last: a set-up that was killed before has left an interpreter that works."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    assert made_by(sys.executable, venv) == "anew\n"


def test_an_environment_that_is_whole_stays(tmp_path: Path) -> None:
    (tmp_path / "venv").symlink_to(sys.prefix)
    assert made_by(sys.executable, tmp_path / "venv") == ""


@pytest.mark.parametrize("given", ["./criu", "folder/../criu", "criu", "/absolute/criu"])
def test_the_record_names_a_given_criu_for_every_folder(tmp_path: Path, given: str) -> None:
    (tmp_path / "folder").mkdir()
    criu = tmp_path / "criu"
    criu.write_text("#!/bin/sh\n")
    criu.chmod(0o755)
    program = 'cd "$1"; works() { :; }; chosen() { echo "$2"; }; choose_criu'
    path = shell(
        program, tmp_path, CRIUCTL_CRIU=given, PATH=f"{tmp_path}:{os.environ['PATH']}"
    ).strip()
    assert path.startswith("/")
    assert os.path.realpath(path) == (given if given.startswith("/") else str(criu))


@pytest.mark.parametrize("missing", ["", "tool"])
def test_a_guard_that_a_killed_set_up_has_left_goes(tmp_path: Path, missing: str) -> None:
    """With it no package could ever start its service."""
    guard = tmp_path / "policy-rc.d"
    program = (
        'missing_packages() { echo "$missing"; }; get_packages() { cat "$guard"; }; cleanup() { '
        ":; }; missing=$1; "
    )
    guard.write_text(
        "#!/bin/sh\n# put here by criuctl set-up for the time of one installation\nexit 101\n"
    )
    output = shell(program + "install_packages_without_services x", missing, CRIUCTL_POLICY=guard)
    assert not guard.exists()
    assert ("exit 101" in output) == bool(missing)


def test_a_guard_of_the_administrator_s_stays(tmp_path: Path) -> None:
    guard = tmp_path / "policy-rc.d"
    guard.write_text("#!/bin/sh\nexit 104\n")
    program = (
        'missing_packages() { echo x; }; get_packages() { cat "$guard"; }; '
        "install_packages_without_services x"
    )
    assert shell(program, CRIUCTL_POLICY=guard).endswith("#!/bin/sh\nexit 104\n")
    assert guard.read_text() == "#!/bin/sh\nexit 104\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "ID=debian\nVERSION_CODENAME=trixie\nPRETTY_NAME='Debian GNU/Linux 13 (trixie)'\n",
            "debian||trixie|Debian GNU/Linux 13 (trixie)",
        ),
        (
            'ID=pete\nID_LIKE="ubuntu debian"\nPRETTY_NAME="Pete\'s Linux"\n',
            "pete|ubuntu debian||Pete's Linux",
        ),
        ("NAME=Nameless\n", "|||a system without a name"),
    ],
)
def test_what_the_system_says_of_itself(tmp_path: Path, text: str, expected: str) -> None:
    release = tmp_path / "os-release"
    release.write_text(text)
    program = 'read_os; echo "$os_id|$os_like|$os_codename|$os_name"'
    assert shell(program, CRIUCTL_OS_RELEASE=release) == f"{expected}\n"


@pytest.mark.parametrize("mask", ["000", "077"])
def test_what_set_up_leaves_is_as_readable_and_writable_as_ever(mask: str) -> None:
    program = f'umask {mask}; trap umask EXIT; set -- --help; . "$0"'
    done = subprocess.run(
        ["sh", "-c", program, SCRIPTS / "setup"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "0022"


def test_the_quickstart_asks_its_server_through_no_proxy(tmp_path: Path) -> None:
    class One(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"1")

        def log_message(self, *_: object) -> None: ...

    (request,) = [
        line
        for line in (SCRIPTS / "quickstart").read_text().splitlines()
        if line.startswith("request() ")
    ]
    with HTTPServer(("127.0.0.1", 0), One) as server:
        serving = threading.Thread(target=server.handle_request)
        server.timeout = 20
        serving.start()
        program = f'port=$1 python=$2 folder=$3; {request}\nrequest || cat "$folder/error"'
        output = shell(
            program,
            str(server.server_port),
            sys.executable,
            tmp_path,
            http_proxy="http://127.0.0.1:9",
            no_proxy="",
        )
        serving.join()
    assert output == "1\n"


def test_another_place_for_the_command_has_all_that_goes_with_it(tmp_path: Path) -> None:
    """Also when a set-up before has put it elsewhere."""
    target = tmp_path / "prefix/venv/bin/criuctl"
    target.parent.mkdir(parents=True)
    target.write_text(
        '#!/bin/sh\nif [ $# -eq 0 ]; then echo complete; else mkdir -p "$4" && echo page '
        '>"$4/criuctl.1"; fi\n'
    )
    target.chmod(0o755)
    program = "say() { :; }; prefix=$1 bin=$2 stamp=same; link_command"
    for place in ("one", "two", "two"):
        shell(program, tmp_path / "prefix", tmp_path / place / "bin")
        assert (tmp_path / place / "bin/criuctl").resolve() == target
        assert (
            tmp_path / place / "share/fish/vendor_completions.d/criuctl.fish"
        ).read_text() == "complete\n"
        assert (tmp_path / place / "share/man/criuctl.1").read_text() == "page\n"

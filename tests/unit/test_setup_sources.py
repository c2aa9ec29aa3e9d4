"""What set-up reads from the machine's apt sources: who may sign the Debian archive, in both
formats that apt knows.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

LIB = Path(__file__).resolve().parents[2] / "scripts/lib"
URI = "http://mirror.example/debian"

EMBEDDED = """\
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc=
 -----END PGP PUBLIC KEY BLOCK-----
"""

A = "signed-by=/keys/a.gpg"
OTHER = (
    "Types: deb\nURIs: http://other.example/debian\nSuites: stable\nComponents: main\nSigned-By: "
    "/keys/other.gpg\n"
)


def signed_by(folder: Path, uri: str) -> str:
    """The answer of set-up's own function for sources in `folder`."""
    program = f'set -eu; . "{LIB}/common.sh"; . "{LIB}/private_apt.sh"; signed_by "$1"'
    environment = os.environ | {"CRIUCTL_APT_SOURCES": str(folder / "sources")}
    done = subprocess.run(
        ["sh", "-c", program, "sh", uri],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        pytest.param({"sources.list": f"deb {URI} bookworm main\n"}, "", id="no key named"),
        pytest.param(
            {"sources.list": f"deb [signed-by=/keys/a.gpg] {URI} bookworm main\n"},
            "Signed-By: /keys/a.gpg\n",
            id="line",
        ),
        pytest.param(
            {
                "sources.list": (
                    f"# deb [signed-by=/keys/x.gpg] {URI} a main\ndeb [ arch=amd64 "
                    f"{A},/keys/b.gpg ] "
                    f"{URI}/ a main\n"
                )
            },
            "Signed-By: /keys/a.gpg /keys/b.gpg\n",
            id="line with other options, two keys and a comment before it",
        ),
        pytest.param(
            {
                "sources.list.d/b.list": f"deb-src [signed-by=/keys/s.gpg] {URI} a main\ndeb "
                f"[{A}] {URI} a main\n"
            },
            "Signed-By: /keys/a.gpg\n",
            id="line in a file of its own, sources aside",
        ),
        pytest.param(
            {
                "sources.list.d/debian.sources": (
                    f"Types: deb\n# a comment\nURIs: {URI}\nSuites: trixie\nSigned-By: "
                    "/keys/a.gpg\n"
                )
            },
            "Signed-By: /keys/a.gpg\n",
            id="stanza",
        ),
        pytest.param(
            {
                "sources.list.d/a.sources": OTHER,
                "sources.list.d/b.sources": f"{OTHER}\nURIs: http://x/ {URI}/\n{EMBEDDED}",
            },
            EMBEDDED,
            id="stanza after others, with the key itself in it",
        ),
        pytest.param(
            {
                "sources.list.d/a.sources": (
                    f"URIs: {URI}-more\nSigned-By: /keys/s.gpg\n\nsigned-by: /keys/a.gpg\nURIs: "
                    f"{URI}\n"
                )
            },
            "signed-by: /keys/a.gpg\n",
            id="stanza beside one whose address only begins alike",
        ),
    ],
)
def test_the_key_of_the_archive_is_found(
    tmp_path: Path, sources: dict[str, str], expected: str
) -> None:
    (tmp_path / "sources.list.d").mkdir()
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    assert signed_by(tmp_path, f"{URI}/") == expected

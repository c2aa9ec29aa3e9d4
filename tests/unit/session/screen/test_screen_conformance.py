"""What `Screen` shows, next to what tmux shows of the same bytes; where it differs on purpose."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.keeper import wait_until

from criuctl.session.screen.screen import Screen

ROWS, COLUMNS = 6, 20
FULL = "x" * COLUMNS

# Cases in which the two agree: text, places, erasing, margins, modes, strings.
SAME = {
    "joined by ZWJ": "👩‍👩‍👧 family",
    "zero width space": "a\u200bb",
    "right-to-left mark": "a\u200fb",
    "byte order mark": "\ufeffab",
    "combining accent": "e\u0301x",
    "flag": "🇩🇪 x",
    "syllable": "가각 x",
    "jamo": "\u1100\u1161\u11a8 x",
    "wide": "世界x",
    "soft hyphen": "a\u00adb",
    "thai": "กำ x",
    "wide at the edge": "x" * 19 + "世y",
    "wide, overwritten from its second half": "世界\x1b[1;3Hx",
    "wrap": FULL + "y",
    "wrap pending, then CR": FULL + "\rz",
    "no wrap": "\x1b[?7labcdefghijklmnopqrstuvwxyz\x1b[?7h",
    "tabs": "a\tb\tc\td",
    "tab stops": "\x1b[3g\x1b[5G\x1bH\r\tx",
    "back tab": "abcdefghijk\x1b[Zx",
    "margins": "\x1b[2;4ra\r\nb\r\nc\r\nd\r\ne\r\nf\x1b[r",
    "margins, RI": "1\r\n2\r\n3\r\n4\r\n5\x1b[2;4r\x1b[2;1H\x1bMx",
    "margins, IND": "1\r\n2\r\n3\r\n4\r\n5\x1b[2;4r\x1b[4;1H\x1bDx",
    "margins the wrong way round": "\x1b[4;2rx\r\ny",
    "margins of one line": "\x1b[3;3rx",
    "margins move the cursor": "abc\x1b[2;4rx",
    "origin mode": "\x1b[2;4r\x1b[?6h\x1b[1;1Hx\x1b[9;3Hy\x1b[?6l",
    "IL": "1\r\n2\r\n3\r\n4\x1b[2;1H\x1b[2Lx",
    "DL": "1\r\n2\r\n3\r\n4\x1b[2;1H\x1b[2Mx",
    "ICH": "abcdef\x1b[1;3H\x1b[2@",
    "DCH": "abcdef\x1b[1;3H\x1b[2P",
    "ECH": "abcdef\x1b[1;3H\x1b[2X",
    "insert mode": "abc\x1b[1;2H\x1b[4hXY\x1b[4l",
    "SU": "1\r\n2\r\n3\x1b[2S",
    "SD": "1\r\n2\r\n3\x1b[2T",
    "ED 0": "1\r\n2\r\n3\x1b[2;1H\x1b[J",
    "ED 1": "11\r\n22\r\n33\x1b[2;1H\x1b[1J",
    "ED 3": "1\r\n2\x1b[3Jx",
    "EL 0": "abc\x1b[1;2H\x1b[K",
    "EL 1": "abc\x1b[1;2H\x1b[1K",
    "EL 2": "abc\x1b[2K",
    "DECSC": "ab\x1b7\x1b[3;3Hc\x1b8d",
    "DECRC alone": "ab\x1b8d",
    "SCOSC": "ab\x1b[s\x1b[3;3Hc\x1b[ud",
    "alternate": "one\x1b[?1049htwo",
    "alternate and back": "one\x1b[?1049htwo\x1b[?1049lx",
    "alternate 47": "one\x1b[?47htwo\x1b[?47lx",
    "REP": "a\x1b[5b",
    "REP beyond the line": "a\x1b[50b",
    "CUU, CUD": "\x1b[3;3H\x1b[9Ax\x1b[9By",
    "CNL, CPL": "ab\x1b[2Ec\x1b[Fd",
    "CHA": "\x1b[5Gx\x1b[0Gy",
    "HPA": "\x1b[5`x",
    "VPA": "\x1b[3dx",
    "CUP outside": "\x1b[99;99Hx",
    "DECALN": "\x1b#8",
    "RIS": "abc\x1bcx",
    "NEL": "ab\x1bEc",
    "RI at the top": "ab\x1bMc",
    "DCS": "a\x1bP+q544e\x1b\\b",
    "APC": "a\x1b_hello\x1b\\b",
    "OSC": "a\x1b]0;t\x07b",
    "OSC, cancelled": "a\x1b]0;t\x18b",
    "CSI, cancelled": "a\x1b[1\x18b",
    "CSI with a control character": "ab\x1b[1\x08Dx",
    "DEL": "a\x7fb",
    "NUL": "a\x00b",
    "FF": "a\x0cb",
    "VT": "a\x0bb",
    "BS at the edge": "\b\bx",
    "soft reset": "\x1b[4;5r\x1b[!px\r\ny",
    "sequences of other terminals": "\x1b[>4;2ma\x1b[?ub\x1b[=1uc",
    "colons": "\x1b[4:3mx\x1b[38:2::1:2:3my",
    "scrolling": "\r\n".join("1234567"),
    "scrolling with a colour": "\x1b[44m" + "\r\n" * 7 + "x",
}
# What differs: tmux 3.3 does not know it, or does not do what xterm does.  The first lines, and
# the cursor's row and column.
OTHERWISE = {
    "an emoji by VS16 is wide": ("⚠️  Warning", ["⚠️  Warning"], (0, 11)),
    "a skin tone joins": ("👍🏽 x", ["👍🏽 x"], (0, 4)),
    "a spacing mark joins": ("नि x", ["नि x"], (0, 3)),
    "half a wide character is blank": ("世界\x1b[1;2Hx", [" x界"], (0, 2)),
    "... deleted": ("世界\x1b[1;2H\x1b[P", [" 界"], (0, 1)),
    "... pushed": ("世界\x1b[1;2H\x1b[@", ["   界"], (0, 1)),
    "... erased": ("世界\x1b[1;2H\x1b[X", ["  界"], (0, 1)),
    "a pending wrap is in the last column": (FULL + "\x1b[Dz", ["x" * 18 + "zx"], (0, 19)),
    "CHT": ("\x1b[2Ix", [" " * 16 + "x"], (0, 17)),
    "IL outside the margins": ("1\r\n2\r\n3\x1b[2;3r\x1b[1;1H\x1b[L", ["1", "2", "3"], (0, 0)),
    "VPR and HPR": ("\x1b[2ex\x1b[2ay", ["", "", "x  y"], (2, 4)),
    "line drawing as its characters": ("\x1b(0lqk\x1b(B", ["┌─┐"], (0, 3)),
    "shifted to the other set": ("\x1b)0\x0elqk\x0fx", ["┌─┐x"], (0, 4)),
    "new line mode": ("\x1b[20ha\nb", ["a", "b"], (1, 1)),
    "IL moves to the first column": ("世\x1b[1;2H\x1b[Lx", ["x", "世"], (0, 1)),
}

Shown = tuple[list[str], tuple[int, int], bool]


def _shown(output: str) -> Shown:
    screen = Screen(COLUMNS, ROWS)
    screen.feed(output.encode())
    return (
        [line.rstrip() for line in screen.text()],
        (screen.cursor.y, screen.cursor.x),
        screen.alternate,
    )


@pytest.mark.parametrize("what", OTHERWISE)
def test_where_it_differs_from_tmux(what: str) -> None:
    output, lines, cursor = OTHERWISE[what]
    assert _shown(output) == (lines + [""] * (ROWS - len(lines)), cursor, False)


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Callable[..., str]]:
    assert shutil.which("tmux") is not None, "tmux is not installed: scripts/setup --dev"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", tmp_path / "socket", "-f", "/dev/null", *arguments],
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(tmp_path)},
            capture_output=True,
            check=True,
            text=True,
            timeout=120,
        )
        return done.stdout

    try:
        yield run
    finally:
        run("kill-server")


def test_it_shows_what_tmux_shows(tmux: Callable[..., str], tmp_path: Path) -> None:
    for number, output in enumerate(SAME.values()):
        (tmp_path / str(number)).write_bytes(output.encode() + b"\x1b]2;done\x07")
        command = f"stty raw -echo; cat {tmp_path / str(number)}; exec sleep 600"
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        tmux("new-session", "-d", *size, "-s", f"s{number}", command)
        if not number:
            tmux("set", "-g", "status", "off")
            tmux("resize-window", "-t", "s0", *size)
    wait_until(
        lambda: tmux("list-panes", "-a", "-F", "#{pane_title}").split() == ["done"] * len(SAME),
        120,
        "tmux has read all of it",
    )
    different = {}
    for number, (what, output) in enumerate(SAME.items()):
        lines = tmux("capture-pane", "-p", "-t", f"s{number}").splitlines()
        lines = [line.rstrip() for line in lines] + [""] * (ROWS - len(lines))
        place = tmux(
            "display-message", "-p", "-t", f"s{number}", "#{cursor_y} #{cursor_x} #{alternate_on}"
        )
        y, x, alternate = map(int, place.split())
        theirs, ours = (lines, (y, x), bool(alternate)), _shown(output)
        if theirs != ours:
            different[what] = (theirs, ours)
    assert not different

"""The page's terminal counts columns as the screen does that is drawn when the page is loaded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from criuctl.session.screen.screen import Screen
from criuctl.web.server import STATIC

TEXTS = [
    *("abc", "日本語x", "한국|", "ｈ|", "é|", "e\u0301|", "क्षि|", "\xad|"),
    *("👨‍👩‍👧|end", "👩🏽‍🚀|", "🏳️‍🌈|", "👁️‍🗨️|", "👍🏽|z", "👍|z", "☕|", "⌚|"),
    *("❤️|x", "❤|x", "©️|", "©|", "1️⃣|", "↔️|", "▶️|", "🇩🇪|y", "🇩🇪🇫🇷|", "🇩|"),
]
# Feeds texts to the provider as the emulator does: [columns, cells] of each.
FEED = """
import { widths } from %s;
let provider;
widths({ unicode: { register: (one) => (provider = one) } });
const fed = (text) => {
  let before = 0, columns = 0;
  const cells = [];
  for (const char of text) {
    const now = provider.charProperties(char.codePointAt(0), before), width = (now >> 1) & 3;
    columns += now & 1 ? width - ((before >> 1) & 3) : width;
    if (now & 1) cells[cells.length - 1] += char;
    else cells.push(char);
    before = now;
  }
  return [columns, cells];
};
console.log(JSON.stringify(%s.map(fed)));
"""


def test_cells_and_columns_are_those_of_the_screen(tmp_path: Path) -> None:
    module = tmp_path / "widths.mjs"  # by this name it is one for Node
    module.write_text((STATIC / "widths.js").read_text())
    program = FEED % (json.dumps(module.as_uri()), json.dumps(TEXTS))
    done = subprocess.run(
        ["node", "--input-type=module", "-e", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for text, (columns, cells) in zip(TEXTS, json.loads(done.stdout), strict=True):
        screen = Screen(40, 2)
        screen.feed(text.encode())
        shown = [cell for cell in screen.rows[0].cells[: screen.cursor.x] if cell]
        assert (screen.cursor.x, shown) == (columns, cells), ascii(text)

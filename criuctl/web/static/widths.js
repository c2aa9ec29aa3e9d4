// Columns of characters, and which of them share a cell: as `criuctl.session.screen.widths` has it, whose screen is drawn
// when the page is loaded.  The emulator's own tables know neither wide emoji nor sequences of them.

const ZWJ = 0x200d,
  VS16 = 0xfe0f;
const PICTOGRAPH = 1, // kinds of what a cell holds
  JOINS = 2, // it ends with a ZWJ
  HALF_FLAG = 4,
  KEY = 8; // a digit or a sign that can be shown as a keycap
const WIDE = [
  [0x1100, 0x115f],
  [0x2e80, 0x303e],
  [0x3041, 0x4dbf],
  [0x4e00, 0xa4cf],
  [0xa960, 0xa97c],
  [0xac00, 0xd7a3],
  [0xf900, 0xfaff],
  [0xfe10, 0xfe19],
  [0xfe30, 0xfe6b],
  [0xff01, 0xff60],
  [0xffe0, 0xffe6],
  [0x16fe0, 0x18d08],
  [0x1aff0, 0x1b2fb],
  [0x1f200, 0x1f265],
  [0x20000, 0x3fffd],
];
const NOTHING = /^[\p{M}\p{Cf}\u1160-\u11ff]$/u,
  EMOJI = /^\p{Emoji_Presentation}$/u,
  PICTURE = /^\p{Extended_Pictographic}$/u,
  CHANGES = /^\p{Emoji}$/u;

const flagHalf = (code) => code >= 0x1f1e6 && code <= 0x1f1ff;
const skin = (code) => code >= 0x1f3fb && code <= 0x1f3ff;

export function wcwidth(code) {
  if (code < 0x300) return code < 32 || (code >= 0x7f && code < 0xa0) ? 0 : 1;
  const char = String.fromCodePoint(code);
  if (NOTHING.test(char)) return 0;
  return flagHalf(code) || EMOJI.test(char) || WIDE.some(([first, last]) => code >= first && code <= last) ? 2 : 1;
}

// The emulator's encoding: 24 bits of ours, two of the width, and whether the character joins the cell before.
const packed = (kind, width, joins) => (kind << 3) | (width << 1) | (joins ? 1 : 0);

function charProperties(code, before) {
  const width = wcwidth(code),
    kind = before >> 3,
    old = (before >> 1) & 3;
  const picture = code >= 0x2190 && PICTURE.test(String.fromCodePoint(code));
  if (width === 0) {
    if (!old) return packed(0, 0, false);
    return packed((kind & ~JOINS) | (code === ZWJ ? JOINS : 0), code === VS16 && kind & (PICTOGRAPH | KEY) ? 2 : old, true);
  }
  if (old && ((kind & JOINS && picture) || (kind & PICTOGRAPH && skin(code)))) return packed(PICTOGRAPH, 2, true);
  if (flagHalf(code)) return old && kind & HALF_FLAG ? packed(0, 2, true) : packed(HALF_FLAG, 2, false);
  const changes = picture || CHANGES.test(String.fromCodePoint(code));
  return packed(code < 0x40 ? (changes ? KEY : 0) : changes ? PICTOGRAPH : 0, width, false);
}

/** Have a terminal of xterm.js use these. */
export function widths(screen) {
  screen.unicode.register({ version: "criuctl", wcwidth, charProperties });
  screen.unicode.activeVersion = "criuctl";
}

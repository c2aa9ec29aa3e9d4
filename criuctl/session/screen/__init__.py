"""Output of a session as a terminal shows it.  Nothing here needs a holder or a connection.

- `screen`: a terminal emulator; `grid` its cells and what changes them, `cells` lines of them,
  `pen` attributes and colours, `widths` which characters share a cell.
- `drawing`: the bytes that make a terminal show a screen.
- `replay`: the screen of a session, from its log; `replay_range` how much of the log that takes.
- `changes`: what output has changed in a terminal, and how to undo it.
- `modes`: the terminal modes that output sets, and the queries in it; small enough for a holder.
- `queries`: old output without the queries in it.
- `emulate`: a program of its own that makes the screen, and finds the cursor, for a holder.
- `asciicast`: output and its times as a recording that asciinema plays.
- `plain_text`: output without its control sequences.
"""

"""Output of a session as a terminal shows it.  Nothing here needs a holder or a connection.

- `screen`: a terminal emulator: the cells, the text, and the bytes that draw them again.
- `cells`: lines of a screen with their colours and attributes, as JSON.
- `modes`: the terminal modes that output sets, and the queries in it; small enough for a holder.
- `redraw`: draw a screen from the log, and follow which screen (alternate or not) is shown.
- `queries`: old output without the queries in it.
- `cursor`: a program of its own that finds the cursor's place for a holder.
- `asciicast`: output and its times as a recording that asciinema plays.
- `plain_text`: output without its control sequences.
"""

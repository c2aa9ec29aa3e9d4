"""The command line: the only package that prints, prompts, and turns errors into exit codes.

- `main` is the entry point and the one error boundary; signals become one exception there.
- `app.App` holds the global options of an invocation (store, --json, -v, -q) and emits results.
- `pages` is how commands are declared: loaded when invoked, with help that reads like a manual
  page; `man_formatter` writes such pages, `manual` the same for `man`, and `topics` has the
  manual's pages and the runbooks.
- `output` turns an operation's events into lines, bars or JSON lines on stderr; `text` formats
  numbers, tables and trees for people.
- `commands` has one module per command: it parses options, calls one operation and prints its
  result.

No other package imports this one. No module here imports an operation before its command is
invoked, because the time that `criuctl --help` and `criuctl list` take is mostly the time of their
imports.
"""

from __future__ import annotations

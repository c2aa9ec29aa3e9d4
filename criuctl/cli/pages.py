"""The declaration of commands: loaded when invoked, with help that reads like a manual page.

A `Page` is a click command whose ``--help`` has the sections of a manual page: NAME, SYNOPSIS,
DESCRIPTION, ARGUMENTS, OPTIONS, GLOBAL OPTIONS, EXAMPLES, EXIT STATUS, SEE ALSO. A `LazyGroup`
has a static table of `Entry`: the module of each command and its one-sentence summary. So the
group's own help, the completion of command names, and an unknown command's message need no import
of any command.

The group and every command take the global options (``criuctl --json list`` and ``criuctl list
--json`` are the same); all of them write into the invocation's `App`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from ..errors import EXIT_CODES
from .app import App
from .man_formatter import ManFormatter
from .streams import write_result

Example = tuple[str, str]


class Entry(NamedTuple):
    """One line of a group's table: ``module:attribute``, summary, and the heading above it."""

    where: str
    summary: str
    heading: str = "Commands"


class PageContext(click.Context):
    """A context whose help is written by `ManFormatter`."""

    formatter_class = ManFormatter


# -- global options
# ---------------------------------------------------------------------------------


class Seconds(click.FloatRange):
    """A number of seconds; click would accept ``nan`` in any range."""

    name = "number of seconds"  # click puts it into its message about an invalid value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail if it is not one."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return number


class GlobalOption(click.Option):
    """An option of every command; it writes into the `App` instead of the command's parameters."""


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    app = ctx.ensure_object(App)
    # for example from a variable that is not set: the default would be another store
    if value == "" and not ctx.resilient_parsing:
        raise click.BadParameter("it is empty", ctx=ctx, param=param)
    if not value or param.name is None:
        return
    if param.name == "verbose":
        app.verbose += value
    else:
        setattr(app, param.name, value)


def _complete_store(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def global_options() -> list[click.Parameter]:
    """Return the options that every command takes, as new objects each time, because click ties
    them to one command.
    """
    declared: list[tuple[list[str], dict[str, Any]]] = [
        (
            ["--store"],
            {
                "metavar": "URL",
                "shell_complete": _complete_store,
                "help": "Use this store: a path, file:///PATH, or s3://BUCKET/PREFIX."
                "  [default: the configuration's, else /var/lib/criuctl/store]",
            },
        ),
        (
            ["config_file", "--config"],
            {
                "metavar": "FILE",
                "type": click.Path(dir_okay=False),
                "help": "Read this configuration file too, after /etc/criuctl/config.yaml and "
                "~/.config/criuctl/config.yaml. One that another user could have written is "
                "refused.",
            },
        ),
        (
            ["--json"],
            {
                "is_flag": True,
                "help": "Print the result as JSON on standard output, and nothing else there.",
            },
        ),
        (
            ["-v", "--verbose"],
            {
                "count": True,
                "help": "Report each step on standard error; with -vv also the origin of an error.",
            },
        ),
        (
            ["-q", "--quiet"],
            {
                "is_flag": True,
                "help": "Report errors only, and print only the core of the result: an id, a PID.",
            },
        ),
    ]
    return [
        GlobalOption(decls, expose_value=False, callback=_remember, **attrs)
        for decls, attrs in declared
    ]


# -- pages
# --------------------------------------------------------------------------------------------


def _write_page(
    command: click.Command,
    summary: str,
    ctx: click.Context,
    formatter: click.HelpFormatter,
    rest: Callable[[], None],
) -> None:
    with formatter.section("Name"):
        formatter.write_text(f"{ctx.command_path} - {summary[:1].lower()}{summary[1:].rstrip('.')}")
    with formatter.section("Synopsis"):
        formatter.write_usage(
            ctx.command_path, " ".join(command.collect_usage_pieces(ctx)), prefix="  "
        )
    if command.help:
        with formatter.section("Description"):
            formatter.write_text(inspect.cleandoc(command.help))
    rest()
    own = [
        p
        for p in command.get_params(ctx)
        if isinstance(p, click.Option) and not isinstance(p, GlobalOption)
    ]
    shared = [p for p in command.get_params(ctx) if isinstance(p, GlobalOption)]
    for heading, options in (("Options", own), ("Global options", shared)):
        records = [record for p in options if (record := p.get_help_record(ctx)) is not None]
        if records:
            with formatter.section(heading):
                formatter.write_dl(records, col_max=24)


Sections = Iterable[tuple[str, list[tuple[str, str]]]]  # headings, each with terms explained


def _write_tail(
    formatter: click.HelpFormatter,
    examples: Sequence[Example],
    exits: Iterable[int],
    see_also: Sequence[str],
    more: Sections = (),
) -> None:
    if not isinstance(formatter, ManFormatter):
        raise TypeError("a page is written by a ManFormatter")
    if examples:
        with formatter.section("Examples"):
            for i, (what, line) in enumerate(examples):
                if i:
                    formatter.write_paragraph()
                formatter.write_example(what, line.splitlines())
    with formatter.section("Exit status"):
        formatter.write_dl(
            [(str(code), EXIT_CODES[code]) for code in exits] + [("128+N", "ended by signal N")]
        )
    for heading, rows in more:
        with formatter.section(heading):
            formatter.write_dl(rows, col_max=24)
    if see_also:
        with formatter.section("See also"):
            formatter.write_text(", ".join(see_also))


def _show_help(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        write_result(ctx.get_help())  # click's own echo does not report a full disk correctly
        ctx.exit()


class Helped(click.Command):
    """A command whose ``--help`` is printed like any result."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option


class Page(Helped):
    """A command with a manual page.

    `examples` are pairs of what they do and the command line, `exits` the exit codes it can end
    with besides 0, 1, 2 and 13, `see_also` the names of related commands.
    """

    context_class = PageContext

    def __init__(
        self,
        *args: Any,
        examples: Sequence[Example] = (),
        exits: Iterable[int] = (),
        see_also: Sequence[str] = (),
        **attrs: Any,
    ) -> None:
        super().__init__(*args, **attrs)
        self.examples = tuple(examples)
        self.exits = tuple(sorted({0, 1, 2, 13, *exits}))
        self.see_also = tuple(f"criuctl {name}" for name in see_also)
        self.params.extend(global_options())

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        def arguments() -> None:
            records = [
                p.get_help_record(ctx)
                for p in self.get_params(ctx)
                if isinstance(p, click.Argument)
            ]
            if records:
                with formatter.section("Arguments"):
                    formatter.write_dl(
                        [(name.strip("[]."), text) for name, text in records if text], col_max=24
                    )

        parent = ctx.parent.command if ctx.parent is not None else None
        entry = parent.entries.get(ctx.info_name or "") if isinstance(parent, LazyGroup) else None
        _write_page(
            self, entry.summary if entry else self.get_short_help_str(), ctx, formatter, arguments
        )
        _write_tail(formatter, self.examples, self.exits, self.see_also)


def page(
    *, examples: Sequence[Example] = (), exits: Iterable[int] = (), see_also: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a function as a command; its docstring is the DESCRIPTION of its manual page."""
    return click.command(
        cls=Page,
        examples=examples,
        exits=exits,
        see_also=see_also,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


# -- groups
# -------------------------------------------------------------------------------------------


class LazyGroup(Helped, click.Group):
    """A group that imports a command's module only when that command is invoked."""

    context_class = PageContext

    def __init__(
        self,
        *args: Any,
        entries: Mapping[str, Entry],
        summary: str,
        default: str = "",
        topics: Callable[[], Sections] = tuple,
        surroundings: Callable[[], Sections] = tuple,
        examples: Sequence[Example] = (),
        exits: Iterable[int] = (),
        see_also: Sequence[str] = (),
        **attrs: Any,
    ) -> None:
        attrs.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(*args, **attrs)
        self.entries = entries
        self.summary = summary
        self.default = default  # the command that is meant when none is named
        self.topics = topics  # further pages to read
        self.surroundings = surroundings  # variables and files
        self.examples = tuple(examples)
        self.exits = tuple(sorted({0, 1, 2, 13, *exits}))
        self.see_also = tuple(f"criuctl {name}" for name in see_also)
        self.params.extend(global_options())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.where.partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.where} is no command")
        command.name = cmd_name
        return command

    def expanded(self, args: list[str]) -> list[str]:
        """Return the arguments with the name of the default command, where none is named."""
        named = (*self.entries, "-h", "--help")
        return [self.default, *args] if self.default and args and args[0] not in named else args

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if ctx.resilient_parsing else self.expanded(args))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click would look for similar names among the loaded commands, and none are loaded.
        if (
            args[0] not in self.entries
            and not args[0].startswith("-")
            and not ctx.resilient_parsing
        ):
            raise click.NoSuchCommand(args[0], possibilities=list(self.entries), ctx=ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [
            CompletionItem(name, help=entry.summary)
            for name, entry in self.entries.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        def commands() -> None:
            headings = dict.fromkeys(entry.heading for entry in self.entries.values())
            width = max(len(name) for name in self.entries)
            for heading in headings:
                with formatter.section(heading):
                    rows = [
                        (n.ljust(width), e.summary)
                        for n, e in self.entries.items()
                        if e.heading == heading
                    ]
                    formatter.write_dl(rows)
            for heading, rows in self.topics():
                with formatter.section(heading):
                    formatter.write_dl(rows)

        _write_page(self, self.summary, ctx, formatter, commands)
        _write_tail(formatter, self.examples, self.exits, self.see_also, self.surroundings())

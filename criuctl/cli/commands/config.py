"""``criuctl config show|check|explain|sample``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ...errors import ConfigError, Conflict, UsageError
from ...redact import redacted, redacted_value
from ..app import App, pass_app
from ..pages import Entry, LazyGroup, page
from ..text import printable

if TYPE_CHECKING:
    from ...ops.config_check import Shown
    from ..config_table import Key

_SELF = "criuctl.cli.commands.config"
_FAULTY = 2  # as a command ends with that configuration

config = LazyGroup(
    "config",
    entries={
        "show": Entry(f"{_SELF}:show", "Show what is configured, and where."),
        "check": Entry(f"{_SELF}:check", "Check the configuration: file, line, key of each fault."),
        "explain": Entry(f"{_SELF}:explain", "Explain keys: type, default, meaning, example."),
        "sample": Entry(f"{_SELF}:sample", "Print a commented configuration file."),
    },
    summary="Show, check and explain the configuration.",
    help="""\
    The configuration is /etc/criuctl/config.yaml, then ~/.config/criuctl/config.yaml, then the file
    of --config, then variables (CRIUCTL_ and the key in upper case), then command-line options. The
    later one counts, key by key. All keys are in criuctl help configuration, which is
    criuctl-config(5).""",
    examples=[
        (
            "Begin with a file that has every key, commented out:",
            "criuctl config sample > mine.yaml",
        ),
        ("Is it right?", "criuctl config check mine.yaml"),
    ],
    exits=[2],
    see_also=["doctor"],
)


@page(
    examples=[
        ("What differs from the defaults, and where it is set:", "criuctl config show"),
        ("All keys, those with their defaults too:", "criuctl config show --effective"),
        ("For a script:", "criuctl config show --effective --json | jq -r .keys.store.value"),
    ],
    see_also=["config check", "config explain"],
)
@click.option("--effective", is_flag=True, help="All keys, also those that have their defaults.")
@pass_app
def show(app: App, effective: bool) -> int:
    """Print the keys that are set, as YAML that could be a configuration file; a comment says which
    line of a file, or which variable, each is from. With -q the comments are left out.

    JSON: files (those that were read), keys: by name, value, source (file, environment, option,
    default), file, line, variable.
    """
    from ... import config as configuration
    from ...ops.config_check import shown

    found = shown(app.config_file, effective=effective, store=app.store)
    files = [str(file) for file in configuration.files(app.config_file)]
    keys = {one.key: _redacted(one.to_dict()) for one in found}
    for body in keys.values():
        del body["key"]
    lines = [f"{one.key}: {_yaml(_redacted(one.value))}" for one in found]

    def human() -> str:
        return "\n".join(_with_places(lines, found)) if lines else _nothing(files)

    app.emit({"files": files, "keys": keys}, human, brief=lambda: "\n".join(lines))
    return 0


def _with_places(lines: Sequence[str], found: Sequence[Shown]) -> list[str]:
    width = min(max(map(len, lines)), 40)
    return [
        f"{line.ljust(width)}  # {printable(one.where)}"
        for line, one in zip(lines, found, strict=True)
    ]


def _nothing(files: Sequence[str]) -> str:
    read = f"nothing in {', '.join(map(printable, files))}" if files else _no_file()
    return f"# nothing is set: {read}, no variable"


def _no_file() -> str:
    from ... import config as configuration

    places = " nor ".join(printable(place) for place in configuration.places())
    return f"no configuration file (neither {places})"


def _redacted(value: Any) -> Any:
    """Return the value without credentials in addresses."""
    if isinstance(value, str):
        return redacted_value(value)
    if isinstance(value, dict):
        return {key: _redacted(inner) for key, inner in value.items()}
    return [_redacted(inner) for inner in value] if isinstance(value, list) else value


def _yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    import yaml

    text: str = yaml.safe_dump(
        [value], default_flow_style=True, width=1 << 30, sort_keys=False, allow_unicode=True
    )
    return text.strip().removeprefix("[").removesuffix("]")


@page(
    examples=[
        ("The configuration in force:", "criuctl config check"),
        ("A file that is not in place yet:", "criuctl config check new.yaml"),
    ],
    exits=[2],
    see_also=["config show", "doctor"],
)
@click.argument(
    "file",
    metavar="[FILE]",
    required=False,
    type=click.Path(),
    help="Check this file alone.  [default: all that criuctl reads, and the variables]",
)
@pass_app
def check(app: App, file: str | None) -> int:
    """Check every key, and print file, line and key of each fault: unknown keys (with those that
    look alike), values of the wrong kind, and what is wrong inside of rules, trees, hosts and the
    like, which other commands read only when they need it. Exit with 2 if there is a fault.

    Variables whose names resemble that of a key, and keys that a file has twice, are warnings.

    JSON: ok, files, findings: level, code, text, hint, file, line, key.
    """
    if file is not None and app.config_file is not None:
        raise click.UsageError("FILE and --config exclude each other")
    from ...ops import config_check

    files, faults = config_check.check(file or app.config_file, alone=file is not None)
    ok = all(fault.level != "error" for fault in faults)
    body = {
        "ok": ok,
        "files": files,
        "findings": [_redacted(fault.to_dict()) for fault in faults],
    }

    def human() -> str:
        lines = []
        for fault in faults:
            warning = "warning: " if fault.level == "warning" else ""
            lines.append(f"{warning}{printable(fault)}")
            lines += [f"  hint: {printable(fault.hint)}"] if fault.hint else []
        if ok:
            lines.append(f"{', '.join(map(printable, files)) or _no_file()}: no faults")
        return redacted("\n".join(lines))

    app.emit(body, human, brief=lambda: "" if ok else human())
    return 0 if ok else _FAULTY


def _complete(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from ..config_table import table

    return [
        CompletionItem(key.name, help=key.meaning)
        for key in table().values()
        if key.name.startswith(incomplete)
    ]


@page(
    examples=[
        ("One key:", "criuctl config explain max_freeze"),
        ("The names of all:", "criuctl config explain -q"),
    ],
    exits=[2],
    see_also=["config show", "config sample"],
)
@click.argument(
    "keys",
    nargs=-1,
    metavar="[KEY]...",
    shell_complete=_complete,
    help="Keys, or the variables that set them.  [default: all]",
)
@pass_app
def explain(app: App, keys: tuple[str, ...]) -> int:
    """Print what a key means, the kind of its value, its default, an example, and the variable that
    sets it.

    JSON: an array of key, section, type, default, meaning, example, variable.
    """
    from ... import config as configuration
    from ..config_table import table

    found = []
    for word in keys or table():
        name = word.lower().removeprefix("criuctl_").replace("-", "_")
        if name not in table():
            near = configuration.nearest(name)
            meant = f"Did you mean {' or '.join(near)}? " if near else ""
            raise ConfigError(
                f"there is no key {word!r}",
                hint=f"{meant}`criuctl config explain -q` lists all keys.",
            )
        found.append(table()[name])
    app.emit(
        [key.to_dict() for key in found],
        lambda: "\n\n".join(map(_explained, found)),
        brief=lambda: "\n".join(key.name for key in found),
    )
    return 0


def _explained(key: Key) -> str:
    width = max(40, min(_columns(), 100))
    return "\n".join(
        [
            f"{key.name} ({key.kind})",
            click.wrap_text(key.meaning, width, "  ", "  "),
            f"  Default:   {key.default}",
            f"  Example:   {key.example}",
            f"  Variable:  {key.variable}",
        ]
    )


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


@page(
    examples=[
        ("A file to begin with:", "criuctl config sample --output /etc/criuctl/config.yaml"),
    ],
    exits=[9],
    see_also=["config explain", "config check"],
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to this new file.  [default: standard output]",
)
@pass_app
def sample(app: App, output: Path | None) -> int:
    """Print a configuration file that has every key with its meaning, an example and its default,
    all commented out: it changes nothing until a # is removed.

    JSON: text, file.
    """
    from ..config_table import sample as text

    if output is None:
        app.emit({"text": text(), "file": None}, lambda: text().rstrip("\n"))
        return 0
    _write_new(output, text())
    body = {"text": text(), "file": str(output)}
    app.emit(body, lambda: f"{printable(output)}: written; nothing is set in it yet")
    return 0


def _write_new(path: Path, text: str) -> None:
    try:
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "w"
        ) as f:
            f.write(text)
    except FileExistsError:
        raise Conflict(f"{path} exists", hint="Name a new file.") from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}",
            hint="Name a file in a folder that exists.",
        ) from error

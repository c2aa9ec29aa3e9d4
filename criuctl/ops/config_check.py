"""What the configuration says, where, and what is wrong in it.

`check` reads the files as `criuctl.config.load` does, but goes on after a fault, and names the line
of each. It also reads the parts that commands read only when they need them: rules of connections,
trees, hosts, retention. `shown` returns the file or the variable that each value is from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from .. import config as configuration
from ..config import Config
from ..errors import ConfigError, CriuctlError
from ..report import Level

Environment = Mapping[str, str]
Reader = tuple[str, Callable[[], object]]  # a key, and what reads its contents


class Fault(Struct, frozen=True):
    """Something wrong with a key; `line` is None in a variable, or where it is unknown."""

    text: str
    file: str | None = None
    line: int | None = None
    key: str | None = None
    hint: str = ""
    level: Level = "error"
    code: str = ConfigError.code

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.text}" if place else self.text


class Shown(Struct, frozen=True):
    """A key, its value, and where that is from."""

    key: str
    value: Any  # as YAML and JSON have it
    source: str  # file, environment, option or default
    file: str | None = None
    line: int | None = None
    variable: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object."""
        return asdict(self)

    @property
    def where(self) -> str:
        """The place, for people."""
        if self.file is not None:
            return f"{self.file}:{self.line}" if self.line else self.file
        return self.variable or self.source


def check(
    path: str | None = None, *, alone: bool = False, environ: Environment = os.environ
) -> tuple[list[str], list[Fault]]:
    """Return the files that were read, and all faults of the configuration.

    `path` is the file of ``--config``; `alone` looks at that file only.
    """
    files = configuration.files(path, environ)
    files = files[-1:] if alone else files
    faults: list[Fault] = []
    good: dict[str, Any] = {}
    places: dict[str, Fault] = {}  # of each good value, without a text
    for file in files:
        _check_file(file, good, places, faults)
    if not alone:
        _check_variables(environ, good, places, faults)
    for key, read in _all_readers(Config(**good)):
        try:
            read()
        except CriuctlError as error:
            place = places.get(key, Fault(""))
            # rules know already in which file they are
            text = error.message.removeprefix(f"{place.file}: ")
            named = re.split(r"\W", text, maxsplit=1)[0]  # one reader may be of several keys
            if named not in configuration.KEYS:
                named, text = key, f"{key}: {text}"
            place = places.get(named, place)
            faults.append(Fault(text, place.file, place.line, named, error.hint))
    order = {str(file): number for number, file in enumerate(files)}
    faults.sort(key=lambda fault: (order.get(fault.file or "", len(files)), fault.line or 0))
    return [str(file) for file in files], faults


def _check_file(
    file: Path, good: dict[str, Any], places: dict[str, Fault], faults: list[Fault]
) -> None:
    where = str(file)
    try:
        loaded, lines = _loaded(file)
    except ConfigError as error:
        text = error.message.removeprefix(f"{where}: ").removeprefix(f"{where} ")
        line = error.details.get("line")
        faults.append(Fault(text.partition("\n")[0], where, line, hint=error.hint))
        return
    for key, value in loaded.items():
        first, *more = lines.get(str(key), [0])
        for line in more:
            text = f"{key} is given before, in line {first}; the last one counts"
            faults.append(Fault(text, where, line, str(key), level="warning"))
        place = Fault("", where, [first, *more][-1] or None, str(key))
        if key not in configuration.KEYS:
            near = configuration.nearest(str(key))
            hint = f"Did you mean {' or '.join(near)}?" if near else _LIST
            faults.append(_at(place, f"unknown key {key!r}", hint))
            continue
        _take(key, value, place, where, good, places, faults)


def _check_variables(
    environ: Environment, good: dict[str, Any], places: dict[str, Fault], faults: list[Fault]
) -> None:
    names = {configuration.variable_of(key): key for key in configuration.KEYS}
    for variable, text in environ.items():
        place = Fault("", variable, key=names.get(variable))
        if variable in names and text:
            _take(names[variable], text, place, variable, good, places, faults)
        elif variable.startswith("CRIUCTL_") and variable not in names:
            near = configuration.nearest(variable.removeprefix("CRIUCTL_"))[:1]
            if near and _typed_alike(variable, configuration.variable_of(near[0])):
                hint = f"Did you mean {configuration.variable_of(near[0])}?"
                faults.append(_at(place, "sets no key", hint, level="warning"))


def _take(
    key: str,
    value: Any,
    place: Fault,
    where: str,
    good: dict[str, Any],
    places: dict[str, Fault],
    faults: list[Fault],
) -> None:
    try:
        good[key], places[key] = configuration.value_of(key, value, where), place
    except ConfigError as error:
        faults.append(_at(place, error.message.removeprefix(f"{where}: "), error.hint))


def _at(place: Fault, text: str, hint: str = "", level: Level = "error") -> Fault:
    return Fault(text, place.file, place.line, place.key, hint, level)


_LIST = "`criuctl config explain` lists all keys."


def _typed_alike(one: str, other: str) -> bool:
    """Return whether one name differs from the other by a slip: the same letters, or but one."""
    if sorted(one) == sorted(other):
        return True
    longer, shorter = sorted((one, other), key=len, reverse=True)
    cuts = {longer[:n] + longer[n + 1 :] for n in range(len(longer))}
    if len(longer) == len(shorter):
        return bool(cuts & {shorter[:n] + shorter[n + 1 :] for n in range(len(shorter))})
    return shorter in cuts


def _loaded(file: Path) -> tuple[dict[Any, Any], dict[str, list[int]]]:
    """Return a file's mapping, and the lines of each key; `ConfigError`, with ``line``."""
    import yaml

    text = configuration.text_of(file)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    # ValueError: for example 2026-02-30, which YAML takes for a day
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        why = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"{file} is not valid YAML: {why}", line=mark.line + 1 if mark else None
        ) from error
    if loaded is None:
        return {}, {}
    if not isinstance(loaded, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{file} must hold a mapping of keys to values", line=1)
    lines: dict[str, list[int]] = {}
    for key, _value in node.value:
        lines.setdefault(str(key.value), []).append(key.start_mark.line + 1)
    return loaded, lines


def late_readers(config: Config) -> Iterator[Reader]:
    """Yield what reads the parts that are read only when they are needed, for example at night by
    cron; each raises a `CriuctlError`.
    """
    from ..files import predicates
    from ..host import configured_trees, retention
    from ..session.client.keyboard import DetachKey
    from ..transport.ssh import Host

    for name, body in config.trees.items():
        yield "trees", partial(configured_trees.parse, name, body)
    yield "retention", partial(retention.policies, config.retention)
    yield "predicates", partial(predicates.configured, config)
    yield "gc_grace", partial(retention.seconds, config.gc_grace)
    if config.detach_key:
        yield "detach_key", partial(DetachKey, config.detach_key)
    for name in config.hosts:
        yield "hosts", partial(Host.parse, name, config)


def _all_readers(config: Config) -> Iterator[Reader]:
    from ..connections import rule_parsing
    from ..hooks import runner
    from ..store import open_store, parse_s3_url

    yield from late_readers(config)
    for rule in config.connection_rules:
        one = config.with_options(connection_rules=(rule,))
        yield "connection_rules", partial(rule_parsing.parse, one)
    yield "hook_failure", partial(runner.check, config)
    if config.store.lower().startswith("s3:"):
        yield "store", partial(parse_s3_url, config.store)
    else:
        yield "store", lambda: open_store(config.store, config).close()


def shown(
    path: str | None = None,
    *,
    effective: bool = False,
    store: str | None = None,
    environ: Environment = os.environ,
) -> list[Shown]:
    """Return the keys that are set, with `effective` all, in the order of their table. `store` is
    that of ``--store``; `ConfigError`.
    """
    found = configuration.settings(path, environ)
    lines: dict[str, dict[str, list[int]]] = {}
    made: list[Shown] = []
    for key in configuration.KEYS:
        if key == "store" and store is not None:
            made.append(Shown(key, store, "option", variable="--store"))
        elif (one := found.get(key)) is None:
            if effective:
                made.append(Shown(key, _plain(key, getattr(Config(), key)), "default"))
        elif one.where == configuration.variable_of(key):
            made.append(Shown(key, _plain(key, one.value), "environment", variable=one.where))
        else:
            if one.where not in lines:
                lines[one.where] = _lines_of(Path(one.where))
            line = lines[one.where].get(key, [None])[-1]
            made.append(Shown(key, _plain(key, one.value), "file", one.where, line))
    return made


def _lines_of(file: Path) -> dict[str, list[int]]:
    if file.is_file():  # a pipe cannot be read twice
        with suppress(ConfigError):
            return _loaded(file)[1]
    return {}


def _plain(key: str, value: Any) -> Any:
    """Return a value as a file would have it."""
    if key == "connection_rules":
        return [rule for _where, rule in value]
    if key == "max_freeze":
        return {**configuration.MAX_FREEZE, **value}
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain("", inner) for name, inner in value.items()}
    return value

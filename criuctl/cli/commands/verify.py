"""``criuctl verify``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ...host.journal.worst_exit_code import worst
from .. import complete
from ..app import App, pass_app
from ..pages import Seconds, page
from ..text import duration, plural, printable, size

_PROBE_FAILED = 10


def _tried(trial: Mapping[str, Any]) -> str:
    """Return the lines for a trial restore."""
    probe = trial["probe"]
    lines = [
        (
            f"{printable(trial['session'])}@{trial['number']}: restored in "
            f"{duration(trial['restore_ms'])}, and gone again"
        )
    ]
    if not trial["alive"]:
        lines.append("  its root had ended by then")
    if probe is not None:
        ended = "was not done" if probe["exit_code"] is None else f"ended with {probe['exit_code']}"
        lines.append(f"  probe {printable(probe['command'])!r} {ended}")
        lines += [f"  | {printable(line)}" for line in probe["output"].splitlines()]
    lines += [f"  {printable(place)} could only be read" for place in trial["read_only"]]
    return "\n".join(lines)


def _percent(_ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse ``5%`` or ``5`` as a number."""
    if value is None:
        return None
    try:
        found = float(value.removesuffix("%"))
    except ValueError:
        found = -1.0
    if not 0 < found <= 100:
        raise click.BadParameter(f"{value!r} is not a part of 100, such as 5%", param=param)
    return found


def _sampled(sample: Mapping[str, Any]) -> str:
    """Return the lines for a sample."""
    packs, amount = sample["packs"], sample["bytes"]
    part = (
        f"{packs['read']} of {plural(packs['of'], 'pack')} read, {size(amount['read'])} of "
        f"{size(amount['of'])}"
    )
    lines = [f"{part}, chosen by seed {sample['seed']}; every manifest read", *_damage(sample)]
    bad = [c for c in sample["checkpoints"] if not c["ok"]]
    return "\n".join(
        [*lines, f"{plural(len(sample['checkpoints']), 'checkpoint')}, {len(bad)} not sound"]
    )


def _damage(sample: Mapping[str, Any]) -> list[str]:
    lines = []
    for pack in sample["damaged"]:
        names = ", ".join(f"{printable(c['session'])}@{c['number']}" for c in pack["needed_by"])
        lines.append(f"{printable(pack['error']['message'])}; needed by {names or 'no checkpoint'}")
    listed = {pack["object"] for pack in sample["damaged"]}
    for one in sample["checkpoints"]:
        if not one["ok"] and one["error"].get("object") not in listed:
            name = (
                "unreadable"
                if one["id"] is None
                else f"{printable(one['session'])}@{one['number']}"
            )
            lines.append(f"{name}: {printable(one['error']['message'])}")
    return lines


def _verdicts(bodies: Sequence[Mapping[str, Any]], *, with_count: bool) -> str:
    """Return a line for each checkpoint."""
    lines = []
    for body in bodies:
        name = (
            "unreadable" if body["id"] is None else f"{printable(body['session'])}@{body['number']}"
        )
        if body["ok"]:
            lines.append(f"{name}: sound, {size(body['bytes'])} checked")
        else:
            lines.append(f"{name}: {printable(body['error']['message'])}")
    bad = sum(not body["ok"] for body in bodies)
    if with_count:
        lines.append(f"{plural(len(bodies), 'checkpoint')}, {bad} not sound")
    return "\n".join(lines)


def _unsound(bodies: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each checkpoint that is not sound, for --quiet."""
    return "\n".join(
        f"{b['id'] or 'unreadable'}  {printable(b['error']['message'])}"
        for b in bodies
        if not b["ok"]
    )


def _sample(app: App, percent: float, seed: int | None) -> int:
    from ...ops.sampled_verify import verify_sample

    with app.reporting() as reporter:
        found = verify_sample(app.config, percent, seed=seed, reporter=reporter)
    body = found.to_dict()
    app.emit(body, lambda: _sampled(body), lambda: "\n".join(_damage(body)))
    return worst(error.exit_code for error in found.errors)


def _try(app: App, ref: str, probe: str | None, timeout: float) -> int:
    from ...ops.trial import trial

    with app.reporting() as reporter:
        body = trial(app.config, ref, probe=probe, timeout=timeout, reporter=reporter).to_dict()
    app.emit(body, lambda: _tried(body), lambda: "" if body["ok"] else _tried(body))
    return 0 if body["ok"] else _PROBE_FAILED


@page(
    examples=[
        ("Is the newest checkpoint of web sound?", "criuctl verify web"),
        ("Check the whole store once a week, from cron:", "criuctl verify --all -q"),
        (
            "A random part of a large store each night:",
            "criuctl verify --all --sample 5% -q",
        ),
        (
            "Does it come back, and does it answer then?",
            "criuctl verify web --restore --probe 'curl -fsS localhost:8080'",
        ),
    ],
    exits=[3, 4, 6, 7, 8, 10, 12, 13],
    see_also=["list", "show", "restore"],
)
@click.argument(
    "ref",
    required=False,
    shell_complete=complete.checkpoint_ref,
    help="NAME, NAME@N, or the begin of a checkpoint's id.",
)
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help="Check every checkpoint of the store, the sound after the damaged ones too.",
)
@click.option(
    "--sample",
    metavar="N%",
    callback=_percent,
    help=(
        "With --all: read every manifest, but of the packs only this part, chosen at random.  "
        "[default: all]"
    ),
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="With --sample: choose the same packs as the run that printed this seed.  "
    "[default: random]",
)
@click.option(
    "--restore",
    "restore_",
    is_flag=True,
    help="Restore the checkpoint for a trial, and remove everything again.",
)
@click.option(
    "--probe",
    metavar="COMMAND",
    help="With --restore: a command for sh, run inside the namespaces of the restored tree; it "
    "has to end with 0.  [default: the configuration's `probes`]",
)
@click.option(
    "--timeout",
    type=Seconds(min=1, max=86400),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="With --restore: how long the restore and the probe may take.",
)
@pass_app
def verify(
    app: App,
    ref: str | None,
    all_: bool,
    sample: float | None,
    seed: int | None,
    restore_: bool,
    probe: str | None,
    timeout: float,
) -> int:
    """Read everything that a restore of the checkpoint would need (manifest, images, memory,
    files), decrypt it and check it against its checksums. Changes nothing.

    Exit with 8 when something is damaged, and name the object; with 7 when an object is missing or
    the store does not answer.

    With --sample, each pack that a checkpoint needs has the same chance; those chosen are read
    once, whole, and checked (100% is the fast way to check all of a store whose checkpoints have
    much in common). All packs must exist, and all manifests are read. Damaged objects are listed
    with the checkpoints that need them; with --json: `ok`, `seed`, `packs` and `bytes` (`read`,
    `of`), `damaged` (`object`, `error`, `needed_by`), `checkpoints`.

    With --restore it is restored for a trial, next to the living session: in its own PID, mount,
    network, IPC and UTS namespaces, on a copy-on-write view of this host's files. The session, its
    lease, its files, its name and its connections are not touched; connections to outside are hung
    up, hooks are not run, and requirements of the checkpoint (dump --require) are not checked.
    Devices and the kernel's own settings are this host's: do not try what you would not run here.
    The trial needs memory for the tree and for copies of the files that it writes to.

    The probe sees the files, processes and network (loopback) of the tree, and CRIUCTL_SESSION,
    CRIUCTL_CHECKPOINT and CRIUCTL_PID. Then all of it is removed, also if criuctl is killed. Exit
    with 0 if it came back and the probe ended with 0, with 6 if it cannot be restored, with 10 if
    the probe failed or was not run, with 12 if it took longer than --timeout, with 4 if there is
    too little memory to try.
    """
    if (ref is None) == (not all_):
        raise click.UsageError("give either a REF or --all")
    if restore_:
        if ref is None:
            raise click.UsageError("--restore tries one checkpoint: give a REF")
        return _try(app, ref, probe, timeout)
    if probe is not None:
        raise click.UsageError("--probe goes with --restore")
    if sample is not None:
        if not all_:
            raise click.UsageError("--sample goes with --all")
        return _sample(app, sample, seed)
    if seed is not None:
        raise click.UsageError("--seed goes with --sample")
    from ...ops.inspect import verify as verify_checkpoints

    with app.reporting() as reporter:
        verdicts = verify_checkpoints(app.config, ref, reporter=reporter)
    if ref is not None and verdicts[0].error is not None:
        raise verdicts[0].error
    bodies = [v.to_dict() for v in verdicts]
    app.emit(
        bodies if all_ else bodies[0],
        lambda: _verdicts(bodies, with_count=all_),
        lambda: _unsound(bodies),
    )
    return worst(v.error.exit_code for v in verdicts if v.error is not None)

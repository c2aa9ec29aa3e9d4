"""``criuctl slurm run|serve``."""

from __future__ import annotations

from pathlib import Path

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..pages import Entry, LazyGroup, Seconds, page
from ..sessions import command_argument
from ..streams import tell

_SELF = "criuctl.cli.commands.slurm"
_SOCKET = "/run/criuctl-slurm/socket"

slurm = LazyGroup(
    "slurm",
    entries={
        "run": Entry(f"{_SELF}:run", "Run a job's program so that it survives preemption."),
        "serve": Entry(f"{_SELF}:serve", "Serve the jobs of this node; runs as root."),
    },
    summary="Jobs of Slurm that survive preemption, time limits and nodes.",
    help="""\
    A job that is preempted is killed, and begins again from nothing. With criuctl it is stored
    when Slurm warns, is queued again, and goes on where it was, on whatever node it is placed.

    The administrator starts criuctl slurm serve on each node. A user starts the program by
    criuctl slurm run in a batch script. See criuctl help slurm-jobs.""",
    examples=[
        (
            "The last line of a batch script with #SBATCH --requeue --signal=B:USR1@120:",
            "exec criuctl slurm run -- ./simulate --steps 1000000",
        ),
    ],
    exits=[3, 4, 7, 13],
    see_also=["dump", "restore", "fence", "unit"],
)

_PATH = click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    metavar="PATH",
    default=Path(_SOCKET),
    help=f"The service's socket.  [default: {_SOCKET}]",
)


@page(
    examples=[
        (
            "The last line of a batch script with #SBATCH --requeue --signal=B:USR1@120:",
            "exec criuctl slurm run -- ./simulate --steps 1000000",
        ),
        (
            "A checkpoint each ten minutes too, for when the node dies:",
            "exec criuctl slurm run --every 10m -- python3 train.py",
        ),
        (
            "Without --signal: two minutes before the time limit:",
            "exec criuctl slurm run --checkpoint-before 120 -- ./simulate",
        ),
    ],
    exits=[3, 4, 6, 13],
    see_also=["slurm serve", "restore"],
)
@click.option(
    "--checkpoint-before",
    "before",
    metavar="SECONDS",
    type=Seconds(0, 2_000_000),
    default=0.0,
    help="Store the program this long before the job's time limit.  [default: at the warning that "
    "`sbatch --signal=B:USR1@SECONDS` asks for]",
)
@click.option(
    "--every",
    metavar="SPAN",
    help="Also store it this often while it runs: 10m, 1h. A node that dies takes with it what was "
    "done since.  [default: never]",
)
@_PATH
@command_argument(required=True, help="The program and its arguments.")
@pass_app
def run(app: App, before: float, every: str | None, path: Path, command: tuple[str, ...]) -> int:
    """Run a program in a job of Slurm. At SIGUSR1 or SIGTERM it is stored and ended, and the job is
    queued again. When the job is started again, on this node or another, the newest checkpoint is
    restored instead of the program being started: with its memory, files, processes and PIDs. Its
    output goes on in the job's output, and its exit code is the job's.

    Use sbatch --requeue --open-mode=append, and exec: Slurm's warning goes to the batch script's
    process alone. Each task of an array is a job of its own.

    The program's standard input is /dev/null unless the job has a file for it. SIGTERM and SIGUSR1
    are ignored in it when it starts, because Slurm sends SIGTERM to all processes of a job that it
    requeues; a program that handles SIGTERM by ending is best warned by
    its own signal (--signal, and send_user_signal in PreemptParameters of slurm.conf).

    A checkpoint that fails is reported, and the program runs on. Where the program has ended by
    itself with exit code 0, its checkpoints are removed; with another one they stay, and a requeue
    restores the newest. The exit code is 75 if the program is stored but Slurm did not queue the
    job again, and 13 if another node has taken the job over or this node's service was killed.
    """
    from ...host.retention import patience
    from ...ops.slurm.runner import Plan, Runner, say

    if app.json:
        raise UsageError("--json has no meaning here: standard output is the program's")
    plan = Plan(command, every=patience(every), before=before)
    return Runner(plan, str(path), say).run()


@page(
    examples=[
        ("As systemd runs it:", "criuctl unit install slurm --now"),
        (
            "With a store of its own, and limits:",
            "criuctl slurm serve --store s3://bucket/jobs --max-memory 64 --keep 3",
        ),
    ],
    exits=[2, 9, 13],
    see_also=["slurm run", "unit", "store init"],
)
@click.option(
    "--max-memory",
    metavar="GIB",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Store no job that uses more memory, 0: any.  [default: 0]",
)
@click.option(
    "--min-interval",
    metavar="SECONDS",
    type=Seconds(0, 86400),
    default=10.0,
    help="Refuse checkpoints of a running job that come sooner after the last.  [default: 10]",
)
@click.option(
    "--keep",
    metavar="N",
    type=click.IntRange(min=1),
    default=2,
    help="Checkpoints that are kept of a job.  [default: 2]",
)
@click.option(
    "--fence-every",
    metavar="SECONDS",
    type=Seconds(0.1, 3600),
    default=30.0,
    help="How often it is checked whether another node has taken a job over.  [default: 30]",
)
@_PATH
@pass_app
def serve(
    app: App,
    max_memory: float,
    min_interval: float,
    keep: int,
    fence_every: float,
    path: Path,
) -> int:
    """Serve the jobs of this node: root's part of criuctl slurm run. It stores and restores
    processes for a job, and only those of that job and its user, which it finds out from the kernel
    and from Slurm; a job names no checkpoint, store or file. See criuctl help slurm-jobs and
    SECURITY.md.

    The store is this command's: --store, or the configuration. Its credentials and keys are root's.
    Stop it with SIGTERM; jobs that run go on being served.
    """
    from ...ops.slurm.checkpoints import Settings
    from ...ops.slurm.service import Service

    settings = Settings(
        max_memory=int(max_memory * (1 << 30)),
        min_interval=min_interval,
        keep=keep,
        fence_every=fence_every,
    )

    def ready() -> None:
        if not app.quiet:
            tell(f"serving the jobs of this node at {path}")

    Service(app.config, settings, path, tell).run(ready)
    return 0

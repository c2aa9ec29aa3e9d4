"""The program: the table of commands, the signals, and the one error boundary.

All other modules raise. Only this module decides what an exception means (`failures` prints it),
and which exit code a script gets:

- a `CriuctlError`: its message and hint on standard error (or ``{"error": ...}`` on standard output
  under --json), the exit code of its class;
- a usage error of click: the same, exit 2;
- SIGINT, SIGTERM, SIGHUP: the first one becomes an exception in the main thread, *once*, so that
  the operation under way cleans up (a tree is thawed, a half-restored one removed).  Later signals
  are reported and ignored, because a clean-up must not be interrupted.  Exit 128+N;
- the reader of standard output went away: no message, exit 141, as of SIGPIPE;
- a file of criuctl's own that this host does not let it read or write: as a `PlatformError`;
- anything else is a bug: one line of apology, the traceback under -v, exit 1.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click

from .. import __version__
from ..errors import NO_MEMORY, NO_THREADS, CriuctlError, UsageError, of_the_host
from .app import PROGRAM, App
from .failures import Signalled, as_usage_error, bug, fail, interrupted
from .pages import Entry, LazyGroup, Sections
from .streams import discard, fill_standard_streams, reader_gone, write_result

COMPLETE_VARIABLE = "_CRIUCTL_COMPLETE"

_HERE = "criuctl.cli.commands"
COMMANDS: dict[str, Entry] = {
    "run": Entry(f"{_HERE}.run:run", "Start a command as a session.", "Sessions"),
    "attach": Entry(
        f"{_HERE}.attach:attach", "Show a session on this terminal, and type into it.", "Sessions"
    ),
    "ps": Entry(f"{_HERE}.ls:ps", "List the sessions that run on this host.", "Sessions"),
    "ls": Entry(f"{_HERE}.ls:ls", "List all sessions that this host knows.", "Sessions"),
    "top": Entry(
        f"{_HERE}.top:top", "Watch the sessions of this host, and act on them.", "Sessions"
    ),
    "status": Entry(f"{_HERE}.status:status", "Show the details of a session.", "Sessions"),
    "send": Entry(f"{_HERE}.send:send", "Type into a session.", "Sessions"),
    "capture": Entry(
        f"{_HERE}.capture:capture", "Print what a session shows, or what it printed.", "Sessions"
    ),
    "wait": Entry(
        f"{_HERE}.wait:wait",
        "Wait for a session's end, silence, prompt, or for a text.",
        "Sessions",
    ),
    "exec": Entry(f"{_HERE}.exec:exec_", "Run a command in a session's live shell.", "Sessions"),
    "output": Entry(f"{_HERE}.output:output", "Print what a command has printed.", "Sessions"),
    "pause": Entry(f"{_HERE}.pause:pause", "Freeze a session.", "Sessions"),
    "resume": Entry(f"{_HERE}.resume:resume", "Let a paused or halted session go on.", "Sessions"),
    "halt": Entry(
        f"{_HERE}.halt:halt", "Stop an agent: freeze now, drop its unread input.", "Sessions"
    ),
    "lease": Entry(
        f"{_HERE}.lease:lease", "Get, take or give up a session's write lease.", "Sessions"
    ),
    "role": Entry(f"{_HERE}.role:role", "Set what an operator may do in a session.", "Sessions"),
    "share": Entry(
        f"{_HERE}.share:share", "Share a session with a guest, by way of a relay.", "Sessions"
    ),
    "signal": Entry(f"{_HERE}.signal:signal_", "Send a signal to a session.", "Sessions"),
    "kill": Entry(f"{_HERE}.kill:kill", "End every process of a session.", "Sessions"),
    "forget": Entry(
        f"{_HERE}.forget:forget", "Remove the output and logs of ended sessions.", "Sessions"
    ),
    "fence": Entry(
        f"{_HERE}.fence:fence", "Stop sessions that another host has taken over.", "Sessions"
    ),
    "log": Entry(
        f"{_HERE}.log:log", "Print a session's audit log, or a recording of it.", "Sessions"
    ),
    "step": Entry(
        f"{_HERE}.step:step", "Durable steps: what is done is not done again.", "Sessions"
    ),
    "ui": Entry(
        f"{_HERE}.ui:ui",
        "Serve a page for the browser: sessions, checkpoints, terminals.",
        "Sessions",
    ),
    "mcp": Entry(
        f"{_HERE}.mcp:mcp", "Serve sessions to agents: Model Context Protocol.", "Sessions"
    ),
    "acp": Entry(
        f"{_HERE}.acp:acp", "Keep the terminals of an editor's agent as sessions.", "Sessions"
    ),
    "check": Entry(
        f"{_HERE}.check:check", "Check whether a process tree can be dumped.", "Checkpoints"
    ),
    "connections": Entry(
        f"{_HERE}.connections:connections", "List a process tree's connections.", "Checkpoints"
    ),
    "tls-relay": Entry(
        f"{_HERE}.tls_relay:tls_relay",
        "Speak TLS to a database for programs that do not.",
        "Checkpoints",
    ),
    "dump": Entry(
        f"{_HERE}.dump:dump", "Store a live process tree as a checkpoint.", "Checkpoints"
    ),
    "restore": Entry(f"{_HERE}.restore:restore", "Bring a checkpoint back to life.", "Checkpoints"),
    "fork": Entry(f"{_HERE}.fork:fork", "Make running copies of a session.", "Checkpoints"),
    "snapshot": Entry(
        f"{_HERE}.snapshot:snapshot", "Dump several trees and leave them running.", "Checkpoints"
    ),
    "schedule": Entry(
        f"{_HERE}.schedule:schedule", "Take snapshots regularly, by systemd or cron.", "Checkpoints"
    ),
    "supervise": Entry(
        f"{_HERE}.supervise:supervise",
        "Keep a session alive, here or on another host.",
        "Checkpoints",
    ),
    "maintenance": Entry(
        f"{_HERE}.maintenance:maintenance",
        "Store all sessions before a reboot, and restore them.",
        "Checkpoints",
    ),
    "recover": Entry(f"{_HERE}.recover:recover", "Restore sessions at a boot.", "Checkpoints"),
    "unit": Entry(
        f"{_HERE}.unit:unit", "Install and remove criuctl's systemd units.", "Checkpoints"
    ),
    "slurm": Entry(
        f"{_HERE}.slurm:slurm",
        "Jobs of Slurm that survive preemption, time limits and nodes.",
        "Checkpoints",
    ),
    "migrate": Entry(
        f"{_HERE}.migrate:migrate", "Move a running tree to another host.", "Checkpoints"
    ),
    "receive": Entry(
        f"{_HERE}.receive:receive",
        "Receive a migration; started by migrate on the other host.",
        "Checkpoints",
    ),
    "list": Entry(f"{_HERE}.list:list_", "List the checkpoints of a store.", "Looking and keeping"),
    "checkpoints": Entry(
        f"{_HERE}.list:list_", "The same as list, under another name.", "Looking and keeping"
    ),
    "show": Entry(
        f"{_HERE}.show:show", "Show the contents of a checkpoint.", "Looking and keeping"
    ),
    "cp": Entry(f"{_HERE}.cp:cp", "Take files out of a checkpoint.", "Looking and keeping"),
    "verify": Entry(
        f"{_HERE}.verify:verify",
        "Read a checkpoint in full and check every byte.",
        "Looking and keeping",
    ),
    "diff": Entry(
        f"{_HERE}.diff:diff", "Show the differences between two checkpoints.", "Looking and keeping"
    ),
    "export": Entry(
        f"{_HERE}.export:export", "Write a checkpoint to a file.", "Looking and keeping"
    ),
    "import": Entry(
        f"{_HERE}.import_:import_",
        "Read an exported checkpoint into a store.",
        "Looking and keeping",
    ),
    "rm": Entry(f"{_HERE}.rm:rm", "Remove checkpoints from a store.", "Looking and keeping"),
    "pin": Entry(f"{_HERE}.pin:pin", "Keep checkpoints from being removed.", "Looking and keeping"),
    "unpin": Entry(
        f"{_HERE}.pin:unpin", "Let pinned checkpoints be removed again.", "Looking and keeping"
    ),
    "prune": Entry(
        f"{_HERE}.prune:prune", "Remove old checkpoints by rule.", "Looking and keeping"
    ),
    "gc": Entry(
        f"{_HERE}.gc:gc", "Free the space that no checkpoint needs any more.", "Looking and keeping"
    ),
    "events": Entry(
        f"{_HERE}.events:events",
        "Show the operations of this host and their outcomes.",
        "Looking and keeping",
    ),
    "metrics": Entry(
        f"{_HERE}.metrics:metrics",
        "Print, write or serve metrics for Prometheus.",
        "Looking and keeping",
    ),
    "hooks": Entry(f"{_HERE}.hooks:hooks", "List hooks, and try one by hand.", "Setting up"),
    "store": Entry(
        f"{_HERE}.store:store", "Make and describe stores and their keys.", "Setting up"
    ),
    "key": Entry(
        f"{_HERE}.key:key", "List and change the keys of an encrypted store.", "Setting up"
    ),
    "config": Entry(
        f"{_HERE}.config:config", "Show, check and explain the configuration.", "Setting up"
    ),
    "doctor": Entry(
        f"{_HERE}.doctor:doctor", "Check this host, its CRIU and the store.", "Setting up"
    ),
    "version": Entry(
        f"{_HERE}.version:version", "Print the versions of criuctl and its parts.", "Setting up"
    ),
    "completion": Entry(
        f"{_HERE}.completion:completion", "Print a shell's completion script.", "Setting up"
    ),
    "help": Entry(
        f"{_HERE}.help:help_", "Show the manual page of a command or a topic.", "Setting up"
    ),
}


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        write_result(f"{PROGRAM} {__version__}")
        ctx.exit()


def _topics() -> list[tuple[str, list[tuple[str, str]]]]:
    from . import topics

    return [
        ("Topics", [(name, topics.title(name)) for name in topics.pages()]),
        ("Runbooks", [(name, topics.title(name)) for name in topics.runbooks()]),
    ]


def _surroundings() -> Sections:
    from . import topics

    page = "environment-and-files"
    key = ("CRIUCTL_*", "Each key of the configuration, in upper case, for example CRIUCTL_STORE.")
    return [
        ("Environment", [key, *topics.items(page, "Variables that criuctl reads")]),
        ("Files", topics.items(page, "Files and folders")),
    ]


cli = LazyGroup(
    PROGRAM,
    entries=COMMANDS,
    summary="keep live Linux executions: sessions, dump, store, verify, restore",
    help="""\
    A session is a command with a terminal of its own that belongs to no login: it is started by
    run, left and come back to by attach, driven by send, capture, wait and exec, and can be
    dumped and restored with its terminal.

    A dump freezes a process tree, stores a complete image of it (a checkpoint) in a store, and
    ends the tree or lets it run on. A restore brings a checkpoint back: same memory, descriptors,
    pipes, sockets and process IDs. Stores are folders and S3 buckets; what is in them is
    compressed, deduplicated, checksummed and, by default, encrypted.

    No failure of a dump loses the tree: it goes on running, or a complete checkpoint exists. A
    restore that fails leaves nothing behind.

    Each command has a manual page: criuctl COMMAND --help. The manual's other pages are shown by
    criuctl help TOPIC. When something has gone wrong: criuctl help store-lost, key-lost,
    fenced-host, restore-refused or disk-full.""",
    topics=_topics,
    surroundings=_surroundings,
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print criuctl's own version (see `criuctl version` for all of them).",
        )
    ],
    examples=[
        (
            "A shell to leave and to come back to:",
            "criuctl run --name work -- bash\ncriuctl attach work",
        ),
        (
            "Store process 4711 and all its descendants, then bring them back:",
            "criuctl dump 4711 --name web\ncriuctl restore web",
        ),
        (
            "The same through S3, the tree running on:",
            "criuctl dump 4711 --leave-running --store s3://backups/trees",
        ),
    ],
    exits=range(3, 14),
)


@contextmanager
def signals_as_exception() -> Iterator[None]:
    """While inside, raise `Signalled` for the first SIGINT, SIGTERM or SIGHUP; report and ignore
    later ones.

    A signal that was ignored when criuctl started (nohup, a shell's background job) stays ignored.
    """
    raised = False

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal raised
        if raised:
            # os.write: print could re-enter a buffered stream that the signal has interrupted.
            os.write(2, b"criuctl: already stopping; cleaning up first\n")
            return
        raised = True
        raise Signalled(number)

    before: dict[int, Any] = {}
    for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(wanted) is not signal.SIG_IGN:
            before[wanted] = signal.signal(wanted, on_signal)
    try:
        yield
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler if handler is not None else signal.SIG_DFL)


def program(at_end: Callable[[], None] | None = None) -> NoReturn:
    """Run `main` and `at_end`, then end the process: the function behind ``criuctl`` on the
    PATH.

    The normal shutdown of the interpreter would take a tenth of a second with boto3 loaded, without
    any use: when `main` returns, all clean-up is done and all threads are joined.
    """
    # a parent that ignores SIGCHLD passes that on, and criuctl could then not wait for its children
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = main()
    if at_end is not None:
        at_end()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    # a closed stream: leave message and exit code to Python
    except (OSError, AttributeError):
        sys.exit(code)
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    instruction = os.environ.get(COMPLETE_VARIABLE)
    if instruction:
        return _complete(instruction)
    fill_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Paths and commands are bytes to the kernel; one that is not valid text must not fail a
            # listing.
            stream.reconfigure(errors="backslashreplace")
    app = App()
    try:
        with signals_as_exception():
            return _run(args, app)
    except KeyboardInterrupt as interrupt:
        return interrupted(interrupt, app)


def _run(args: list[str], app: App) -> int:
    try:
        with cli.make_context(PROGRAM, args, obj=app) as ctx:
            code = cli.invoke(ctx)
            return code if isinstance(code, int) else 0
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.UsageError as error:
        # click did not parse the arguments after the mistake.
        app.json = app.json or "--json" in (args[: args.index("--")] if "--" in args else args)
        return fail(as_usage_error(error), app)
    except click.ClickException as error:
        return fail(UsageError(error.format_message()), app)
    except click.Abort as error:  # a prompt was left, by a signal or at the end of input
        return interrupted(
            error.__context__ if isinstance(error.__context__, Signalled) else KeyboardInterrupt(),
            app,
        )
    except CriuctlError as error:
        return fail(error, app)
    except BrokenPipeError as error:
        if not reader_gone():
            return bug(error, app)
        discard(1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        known = of_the_host(error)
        return bug(error, app) if known is None else fail(known, app)
    except MemoryError:
        return fail(NO_MEMORY, app)
    except RuntimeError as error:
        return fail(NO_THREADS, app) if _lacks_threads(error) else bug(error, app)
    except Exception as error:  # the error boundary: any other exception is a bug by definition
        return bug(error, app)


def _lacks_threads(error: BaseException | None) -> bool:
    """Return whether the cause was a thread that could not be started; Python has no exception
    class for it.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return True
        error = error.__context__
    return False


def _complete(instruction: str) -> int:
    """Answer the shell's completion request; never print to standard error."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(cli, {"obj": App()}, PROGRAM, COMPLETE_VARIABLE, instruction)
    except (Exception, KeyboardInterrupt):
        # The user is typing a command line; a message there would be worse than no completion.
        return 1

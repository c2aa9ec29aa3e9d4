"""A restored tree before its first instruction: the last moment at which everything can be taken
back.

CRIU holds every process.  What CRIU has opened is compared with what was judged, the memory is
completed, repairs and connections follow, hooks may veto, and the session is recorded before the
tree runs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msgspec import Struct, field

from ..cgroups import membership
from ..criu.mountspaces import mount_spaces
from ..criu.procfiles import OwnFile
from ..errors import NoSuchProcess, RestoreFailed
from ..files import memory_files
from ..namespaces import network_contents
from ..proc.namespaces import pid_in
from ..proc.procfs import read_status
from ..proc.tree import ProcessIdentity
from ..repairs.base import RestoredTree
from . import comparison, hand_back, late_proc_files
from .early_tasks import EarlyTasks
from .mount_views import Views
from .surroundings import Surroundings
from .work import RestoreWork

_SHOWN = 5  # steps that a warning names
_SEVEN_BITS = 0x7F  # what CRIU leaves of an exit code


class PlacedTree(Struct, eq=False):
    """The processes of one restore while CRIU holds them."""

    work: RestoreWork
    around: Surroundings
    root: ProcessIdentity | None = None  # from when it is restored until it runs
    pids: dict[int, int] = field(default_factory=dict)  # PID in the tree -> PID on this host
    connections: list[dict[str, Any]] = field(default_factory=list)  # their outcomes
    mended: RestoredTree | None = None
    own: list[OwnFile] = field(default_factory=list)  # files that the processes open themselves
    _views: Views | None = None  # of the mount namespaces

    def complete(self, inner: int) -> None:
        """Complete the tree whose root CRIU calls `inner`; what raises is a veto, and nothing is
        left.
        """
        work, around = self.work, self.around
        work.reporter.step("post-restore")
        work.terminals.made()
        root = self._outer(inner)
        self.root = ProcessIdentity.of(root)
        if around.following is not None:
            around.following.watch(self.root)
        if around.early is not None:
            self._report_early(around.early)
        self.pids = pids = hand_back.outer_pids(root)
        self._compare(root)
        # Its memory is whole before anything runs inside one of its processes.
        if work.filling is not None:
            work.reporter.step("memory")
            work.filling.finish(pids)
        if around.private is not None and around.names is not None:
            around.names.show(around.private.init.pid)
        self._show_folders()
        if work.plan.net == "dumped":
            network_contents.complete(work.manifest.namespaces["net"], pids, work.reporter)
        self._reopen()
        # Repairs before connections: a hook may let a connection's owner get signals.
        self.mended = RestoredTree(
            work.images, work.manifest, root, pids, work.reporter, work.terminals.owners
        )
        around.repairs.mend(self.mended)
        self._hand_back(root)
        self._rejoin_groups()
        work.terminals.replant(work.reader, pids, work.reporter)
        work.hooks.run("post-restore", pid=root, connections=self.connections)
        if around.following is not None:
            around.following.watched()
        partners = work.partners
        if partners.group is not None:
            # CRIU is about to unlock the connections: both ends of each must exist
            assert around.names is not None and around.linked is not None
            answer = partners.group.meet("placed", shown=around.names.shown)
            if around.private is not None:
                around.names.show(around.private.init.pid, answer["shown"])
            around.linked.shut_down()
        if partners.held is not None:  # the other host decides when the tree may run
            partners.held(self.connections)
        # From the record on a criuctl that is killed leaves a session that is known.
        work.home.register(root, self.connections, work.reporter)
        self._note_memory(root)
        if around.following is not None:
            around.following.about_to_run()
        init = around.private.init.pid if around.private is not None else 0
        work.holder.adopt(root, init, work.terminals.ptys, pids, work.images)
        self._report_steps()
        work.reporter.step("resume")

    def _show_folders(self) -> None:
        """Show a workspace that was moved at the paths that the programs know."""
        work, around = self.work, self.around
        if not work.shown:
            return
        if around.private is None or around.names is None:
            work.reporter.warning(
                f"{work.shown[0][0]} cannot be shown at {work.shown[0][1]}: what the tree opens by "
                "that path is the original's",
                "Restore with --pids auto.",
            )
            return
        around.names.show(around.private.init.pid, work.shown)

    def _note_memory(self, root: int) -> None:
        """Record which files go with the tree."""
        try:
            memory_files.note(self.work.config, root, self.around.applied_files.made())
        except OSError as error:
            self.work.reporter.warning(
                f"files in memory of the copy will stay when it has ended: {error}"
            )

    def _report_steps(self) -> None:
        """Report the attempts of steps that come back in the middle."""
        steps = self.work.holder.steps
        if names := steps.get("in_flight"):
            self.work.reporter.warning(
                f"steps under way at the dump go on in the middle: {_named(names)}",
                "What they did after the dump, in their former life, they do again.",
            )
        if names := steps.get("repeated"):
            self.work.reporter.warning(
                f"steps that are done already go on in the middle: {_named(names)}",
                "Their effect may happen again, unless its receiver recognises the step's key.",
            )

    def _outer(self, inner: int) -> int:
        """Return our PID of the process that CRIU, in its PID namespace, calls `inner`."""
        if self.around.private is None:
            return inner
        found = pid_in(self.around.private.pid_namespace, inner)
        if found is None:
            raise RestoreFailed(
                f"the restored root, PID {inner} of its namespace, has ended at once"
            )
        return found

    def _report_early(self, early: EarlyTasks) -> None:
        reporter = self.work.reporter
        if without_terminal := early.stop():
            reporter.warning(
                f"sessions {sorted(without_terminal)}: only their leaders have their controlling "
                "terminal"
            )
        for pid, code in sorted(early.codes.items()):
            reporter.warning(
                f"PID {pid}, which has ended and was not waited for, ended with "
                f"{code & _SEVEN_BITS}, not {code}"
            )

    def _compare(self, root: int) -> None:
        """Compare what the processes hold with what was judged: a difference is a veto."""
        around = self.around
        assert around.expected is not None and around.judge is not None
        self._views = Views(mount_spaces(self.work.images), self.pids, root)
        comparison.compare(around.expected, around.judge, self.pids, self._views)
        if around.binds is not None:
            around.binds.bind(self.pids)
            around.binds.compare(self.pids)

    def _reopen(self) -> None:
        """Have the processes open what CRIU cannot: GPUs' nodes, files of /proc.  Take back what
        each is to open with its own rights.
        """
        judge, late = self.around.judge, self.around.proc_files.late
        assert judge is not None and self.around.expected is not None
        self.own = list(comparison.take_back(self.around.expected, judge, self.pids))
        if self.work.devices is not None:
            self.work.devices.reopen(self.pids, judge.holders)
        late_proc_files.open_late(late, self.pids)
        assert self._views is not None
        comparison.compare_late(late, judge, self.pids, self._views)

    def _hand_back(self, root: int) -> None:
        """Hand the external connections back, and give those that stay as they were their
        options.
        """
        work, judge = self.work, self.around.judge
        assert judge is not None
        planned = work.plan.connections
        if planned:
            work.reporter.step("connections")
        facts = work.hooks.facts | {"pid": root}
        self.connections = hand_back.HandBack(
            work.config, planned, self.pids, facts, judge.holders
        ).run()
        changed = hand_back.endings(planned)
        as_it_was = [r for r in work.manifest.connections if (r.pid, r.fd) not in changed]
        hand_back.set_options(as_it_was, self.pids, work.reporter)

    def _rejoin_groups(self) -> None:
        """Move the processes into the control groups that they were in, on the same host, and out
        of criuctl's unit.
        """
        work, pids = self.work, self.pids
        if work.groups:  # all of it was made there: see `Restoring`
            if missing := membership.put_back(dict.fromkeys(pids.values(), work.groups)):
                raise RestoreFailed(f"control groups are gone: {', '.join(missing)}")
            return
        if work.at_home:
            wanted = {
                pids[p.ns_pid]: p.cgroups
                for p in work.manifest.processes
                if p.cgroups and p.ns_pid in pids
            }
            if missing := membership.put_back(wanted):
                groups = ", ".join(missing)
                work.reporter.warning(
                    f"control groups that are gone: {groups}; the tree is in criuctl's"
                )
        if not work.holder.needed:
            listed = (p for p in work.manifest.processes if p.ns_pid in pids)
            services = {pids[p.ns_pid]: membership.service_of(p.cgroups) for p in listed}
            init = {self.around.private.init.pid: ""} if self.around.private is not None else {}
            membership.leave_unit(services | init)

    def tracer(self) -> int:
        """Return the PID of the CRIU that holds the tree; 0 if that cannot be found out."""
        for pid in self.pids.values():
            with suppress(NoSuchProcess):  # this one was killed
                if found := int(read_status(pid)["TracerPid"]):
                    return found
        return 0


def _named(names: list[str]) -> str:
    """Return the first of these names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

"""CRIU's part of a restore: from plain images in a folder to a tree that runs, or to nothing.

Everything that is made for it on this host (`criuctl.restore.surroundings`) is undone in reverse
until the tree runs for good.  From then on there is no way back: a tree that no session records, or
whose lease is given back, might be restored a second time, so no signal and no failure stops what
is left to do.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from msgspec import Struct

from ..cgroups import membership
from ..criu import binary, driver
from ..criu.rpc import end_tracer
from ..errors import RestoreFailed
from ..proc.child import InterruptsDeferred
from ..proc.reopen import join_empty_keyring
from ..proc.tree import children
from . import outcome, own_files
from .placed import PlacedTree
from .surroundings import Surroundings
from .work import RestoreWork


class Restoring(Struct, eq=False):
    """One restore by CRIU."""

    work: RestoreWork
    around: Surroundings
    placed: PlacedTree
    inner_root: int  # the root's PID as the tree sees it
    root: int = 0  # our PID of the root, once the tree runs for good
    running_at: float = 0.0  # monotonic

    @classmethod
    def of(cls, work: RestoreWork) -> Restoring:
        """Return a restore that has not begun."""
        stack = ExitStack()
        around = Surroundings(work, stack, kill=lambda: None)
        placed = PlacedTree(work, around)
        around.kill = lambda: outcome.kill_tree(placed.root)
        return cls(work, around, placed, work.images.pids()[0])

    def run(self, criu: binary.CriuBinary, running: ExitStack) -> int:
        """Restore the tree and let it run; return our PID of its root.

        Once it runs no signal stops anything until `running` is left, and a failure is a warning.
        """
        try:
            with self.around.stack:
                self._run(criu, running)
        except Exception as error:
            if not self.root:
                raise
            self.work.reporter.warning(
                f"not everything that was made for the restore could be taken down: {error}"
            )
        return self.root

    def _run(self, criu: binary.CriuBinary, running: ExitStack) -> None:
        work, around, placed = self.work, self.around, self.placed
        options = around.prepare()
        work.reporter.step("restore")
        assert around.names is not None
        around.names.begin()
        driver.restore(
            criu,
            work.folder,
            options,
            placed.complete,
            enter=around.prefix,
            start=work.holder.starter if around.private is None else None,
            about_to_fork=self._about_to_fork,
            about_to_run=lambda: self._let_go(running),
            broken_off=lambda: outcome.kill_tree(placed.root, 0),
        )
        self.running_at = time.monotonic()
        assert placed.root is not None  # CRIU has passed post-restore, or the driver raised
        root = placed.root.pid  # it may have ended already: that is no failure of the restore
        if around.following is not None:
            work.reporter.step("pages-follow")
            around.following.finish()
            running.enter_context(InterruptsDeferred())
        self.root, placed.root, around.kept = root, None, True

    def _about_to_fork(self, criu: int) -> None:
        """Put CRIU where its children are to be from the start: their memory is counted there, and
        users get no key of root's.
        """
        around = self.around
        assert around.judge is not None
        if not all(user.opens_all for user in around.judge.holders.values()):
            for maker in (criu, *children(criu)):  # CRIU may be a child of what enters namespaces
                join_empty_keyring(maker)
        if groups := self.work.groups:
            init = [around.private.init.pid] if around.private is not None else []
            makers = [criu, *children(criu), *init]  # CRIU may be a child of what enters namespaces
            if missing := membership.put_back(dict.fromkeys(makers, groups)):
                raise RestoreFailed(
                    f"control groups that the tree must be in are gone: {', '.join(missing)}",
                    hint="Did the job end meanwhile?",
                )
        if around.early is not None:
            around.early.follow(criu)

    def _let_go(self, running: ExitStack) -> int | None:
        """Make the last steps; without interruptions, unless a single tree has still to get its
        memory.

        Return the PID of the tracer; None: CRIU has ended.
        """
        # Each process has its own credentials by now, and none has run.
        own, placed = [*self.around.proc_files.own, *self.placed.own], self.placed
        own_files.open_own(own, placed.pids, placed.tracer(), self.work.reporter)
        group = self.work.partners.group
        if self.around.following is None or group is not None:
            running.enter_context(InterruptsDeferred())
        if group is not None:  # what can fail for one of them has been done by all
            group.meet("running", decisive=True)
        return self._release()

    def _release(self) -> int | None:
        """Point of no return.  Return the tracer's PID, 0 if it is not known, None if CRIU has
        ended.
        """
        work, around, placed = self.work, self.around, self.placed
        around.pipes.close()
        assert placed.mended is not None
        around.repairs.release(placed.mended)
        devices = work.devices if work.devices is not None and work.devices.needed else None
        if devices is not None:  # the last step that can fail; nothing of the program runs in it
            stopped = work.images.stopped()
            devices.bring_back(placed.pids, stopped, lambda: end_tracer(placed.tracer()))
        # if criuctl is killed from here on the tree must not end with its namespaces
        if around.fresh is not None:
            around.fresh.keep(
                self.inner_root, ends_with_root=work.holder.ends_with_root or work.ends_with_root
            )
        work.holder.settle()
        if devices is not None:
            devices.release()
            return None
        return placed.tracer()

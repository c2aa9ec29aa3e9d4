"""CRIU's part of a restore: from plain images in a folder to a tree that runs, or to nothing.

Everything that is made for it on this host (files put back, helper links, terminals, namespaces, firewall tables) is made here,
and is taken back in reverse until the tree runs for good.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from ..cgroups import membership, remade
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..config import Config
from ..criu import binary, driver, ghostfolders, netimages, procfiles, ttyimages
from ..criu.heldfiles import credentials, held_files
from ..criu.images import ImageSet
from ..criu.lazy import LazyImage, LazyPages
from ..criu.options import RestoreOptions
from ..criu.owners import user_ids
from ..criu.rpc import end_tracer
from ..errors import NoSuchProcess, RestoreFailed
from ..files import fifos, handover, overlays, remaps
from ..files.granting import HINT, Judge
from ..files.putback import Applied
from ..files.socket_binds import OwnBinds
from ..files.socket_names import Bindings
from ..hooks import Hooks
from ..host.holders import RestoredHolder
from ..host.registry import boot_id
from ..namespaces import netplace, networks
from ..namespaces.namespaces import last_pid
from ..namespaces.netlock import ConnectionLock
from ..namespaces.ports import free_ports
from ..proc.child import InterruptsDeferred
from ..proc.controlled import Looks
from ..proc.namespaces import pid_in
from ..proc.privatens import PrivateNamespaces
from ..proc.procfs import read_status
from ..proc.tree import ProcessIdentity, running_for
from ..repairs.base import RestoredTree, RestoreImages
from ..repairs.registry import Repairs
from ..report import Reporter
from ..terminals.restored import RestoredTerminals
from . import arrival, comparison, handback, lateprocfiles
from .earlytasks import EarlyTasks, needs_subreaper
from .feeding import FedPages, Feeder
from .filling import Filling
from .plan import RestorePlan, taken

if TYPE_CHECKING:
    from .devices import RestoredDevices

_CROWD = 32  # processes
_SEVEN_BITS = 0x7F  # what CRIU leaves of an exit code


class Restoring(Struct):
    """One restore under way: from images and pages in a folder to a running tree."""

    config: Config
    reporter: Reporter
    manifest: Manifest
    plan: RestorePlan
    images: ImageSet
    terminals: RestoredTerminals
    holder: RestoredHolder
    folder: int
    reader: CheckpointReader
    register: Callable[[int], None]  # the root's PID, before it runs
    lazy: dict[int, LazyImage]  # pages that follow later; empty for an eager restore
    hooks: Hooks
    copy: bool = False  # beside a live original
    held: Callable[[list[dict[str, Any]]], None] | None = None
    feeder: Feeder | None = None
    authentic: bool = False  # nobody else than criuctl's own can have written the checkpoint
    devices: RestoredDevices | None = None  # GPUs; of a tree that uses some
    filling: Filling | None = None  # pages of an eager restore that CRIU does not bring
    inner_root: int = 0  # the root's PID as the tree sees it
    connections: list[dict[str, Any]] = field(default_factory=list)
    aside: list[tuple[str, str]] = field(default_factory=list)
    own_files: dict[str, str] = field(default_factory=dict)
    own_names: dict[str, str] = field(default_factory=dict)  # of unix sockets
    names: Bindings | None = None  # of the tree's unix sockets
    placed: ProcessIdentity | None = None  # the root, from when it is restored until it runs
    pids: tuple[int, ...] = ()  # of the tree, once it is restored
    outer: dict[int, int] = field(default_factory=dict)  # its own PIDs -> ours, likewise
    repairs: Repairs = field(default_factory=Repairs)
    restored: RestoredTree | None = None  # what they mend
    proc_files: procfiles.Sorted = field(default_factory=procfiles.Sorted)
    pipes: ExitStack = field(default_factory=ExitStack)  # named ones that we have open until the tree has
    early: EarlyTasks | None = None  # who gives terminals to leaders before they have children
    following: LazyPages | FedPages | None = None  # who brings the pages of a lazy restore
    fresh: PrivateNamespaces | None = None  # made for the tree
    running_at: float = 0.0  # monotonic
    root: int = 0  # the root's PID as we see it, once the tree runs for good
    locked: bool = False  # whether the lock on the connections could not be taken down
    net: int | None = None  # descriptor of the net namespace, if it is not ours
    expected: handover.Expected | None = None  # what CRIU is to open by paths
    judge: Judge | None = None  # of that
    binds: OwnBinds | None = None  # the tree's unix sockets with paths

    def run(self, criu: binary.CriuBinary, running: ExitStack) -> int:
        """Restore and let it run; returns the root's PID as we see it.

        From when it runs for good no signal breaks anything off until `running` is left, and no failure: there is no way back,
        and a tree that nobody knows of, or whose lease is given back, might be restored a second time.
        """
        try:
            self._run(criu, running)
        except Exception as error:
            if not self.root:
                raise
            self.reporter.warning(f"not everything that was made for the restore could be taken down: {error}")
        return self.root

    def _run(self, criu: binary.CriuBinary, running: ExitStack) -> None:
        manifest, plan = self.manifest, self.plan
        self.inner_root = self.images.pids()[0]
        self.images.give_up(handback.endings(plan.connections), plan.no_interfaces)
        # What came along is as it was read, and somebody may have made it shorter just then: CRIU may know another size.  To what
        # a copy shares with its original that may write at any moment.
        judged = {
            j.record.path
            for j in plan.files
            if j.verdict in ("grown", "moved-on") or j.record.data is not None or (self.copy and j.record.kind == "written")
        }
        if judged:
            self.images.forget_sizes(judged)

        self.proc_files = self._sort_proc_files()
        with ExitStack() as stack:
            applied = Applied(self.reader, manifest.id[:8])
            stack.callback(lambda: None if self.root else applied.undo())
            self.reporter.step("files")
            applied.apply(plan.files)
            for path, made in applied.apart:
                self.reporter.warning(f"{path}: was one file with {made}; here they are on two file systems, and so two files")
            self.images.move_files(applied.own)
            self.images.forget_modes()
            ttyimages.forget_modes(self.images)
            names = self.names = Bindings(self.images, plan.names)
            stack.callback(lambda: None if self.root else names.undo())
            names.put()
            links = stack.enter_context(remaps.provided(plan.deleted, self.images, self.reader, applied.own, self.reporter))
            self.holder.prepare(self.reader, stack, private=plan.pids == "private")
            private: PrivateNamespaces | None = None  # whose PIDs CRIU will speak of
            prefix: list[str] = []
            if plan.net in ("named", "existing"):
                self.net, place = netplace.enter(manifest, plan.net, plan.net_source)
                stack.callback(os.close, self.net)
                prefix = ["nsenter", f"--net={place}", "--"]
                if netplace.new(manifest) == "dumped":
                    netimages.leave_network(self.images)
            network = list(prefix)
            if plan.pids == "private" or plan.net == "private":
                spaces = PrivateNamespaces(
                    net=plan.net == "private",
                    reserved=self.images.reserved_ids() | self.proc_files.numbers,
                    last=last_pid(manifest.namespaces),
                    bind=self.holder.shown,
                    layers=stack.enter_context(overlays.laid(plan.files, self.reader, user_ids(self.images))),
                    start=self.holder.starter,
                )
                fresh = self.fresh = stack.enter_context(spaces)
                stack.callback(lambda: None if self.root else fresh.discard())
                if fresh.net:
                    netplace.lend_addresses(manifest, fresh.init.pid)
                # A tree that is PID 1 makes its own PID namespace: CRIU must stay outside of any other.
                private = None if plan.pids == "init" else fresh
                network = [*prefix, *(fresh.net_entry if fresh.net else [])]
                prefix += fresh.net_entry if private is None else fresh.entry
            lock = ConnectionLock(self.images, self.reporter, self.net, fresh=netplace.is_new(plan.net))
            stack.callback(lambda: self._unlock(lock))
            if plan.net == "dumped":  # CRIU makes it, and locks it
                netimages.forget_states(self.images)
            else:
                lock.make(network)  # not with libraries that came along
            if not netplace.is_new(plan.net):
                free_ports(manifest.connections, self.images, self.net)
            on: str | None = None
            if plan.pids == "init":
                on = arrival.mount_point()
                prefix += [*arrival.PRIVATE_ROOT, on]
            groups = self._groups_anew(stack)
            if groups is None and (moved := remade.rejoin_threads(self.images)):
                self.reporter.warning(
                    f"threads {sorted(moved)} were in other control groups than their process; they are in its now"
                )
            stack.callback(lambda: arrival.kill_tree(self.placed))
            theirs = f"/proc/{private.init.pid}/root" if private is not None else ""
            judge = Judge.of(self.config, manifest, credentials(self.images), authentic=self.authentic, made=applied.created)
            inherit = self._open_external(stack, judge) | self.terminals.open(stack, theirs)
            options = RestoreOptions(
                shell_job=not ttyimages.led_by_device(self.images),
                lazy=bool(self.lazy),
                groups=groups,
                inherit=inherit,
                root=on,
                crowded=len(manifest.processes) >= _CROWD,
                mounted_terminals=ttyimages.are_mounted(self.images),
            )
            asked = RestoreImages(self.images, self.reporter, stack, self._age(), in_session=self.holder.needed)
            self.repairs.amend_restore(asked)
            inherit |= asked.inherit
            space = private.pid_namespace if private is not None else None
            codes = {pid: code for pid, code in self.images.exit_codes().items() if code > _SEVEN_BITS}
            early = EarlyTasks(self.inner_root, self.terminals.controlling(), needs_subreaper(self.images), space, codes)
            if early.terminals or early.subreaper or codes:
                stack.callback(early.stop)
                self.early = early
            if self.lazy:
                self.following = (
                    stack.enter_context(LazyPages(criu, self.folder, self.lazy, prefix))
                    if self.feeder is None
                    else stack.enter_context(self.feeder.pages(criu, prefix))
                )
            start = self.holder.starter if private is None else None
            folders = ghostfolders.arrange(self.images, own_mounts=plan.pids == "init")
            stack.callback(lambda: None if self.root else arrival.remove_folders(folders))
            ghosts = self.images.number_ghosts(self.holder.session)
            arrival.remove_ghosts(ghosts)  # of a CRIU that was killed together with its criuctl, restoring this session
            stack.callback(lambda: None if self.root else arrival.remove_ghosts(ghosts))
            expected = self._expect(judge, theirs, links, stack)
            stack.enter_context(self.pipes)
            places = expected.places()
            pipes = fifos.settled(self.images, manifest, self.reporter, theirs, copy=self.copy, places=places)
            self.pipes.enter_context(pipes)
            inherit |= handover.hand_over(self.images, expected)
            options = replace(options, inherit=inherit)
            self.reporter.step("restore")
            names.begin()
            driver.restore(
                criu,
                self.folder,
                options,
                lambda pid: self._placed(pid, private),
                enter=prefix,
                start=start,
                about_to_fork=self.early.follow if self.early is not None else None,
                about_to_run=lambda: self._let_go(running),
                broken_off=lambda: arrival.kill_tree(self.placed, 0),
            )
            self.running_at = time.monotonic()
            assert self.placed is not None  # CRIU has passed post-restore, or the driver raised
            root = self.placed.pid  # it may have ended already: that is no failure of the restore
            if self.following is not None:
                self.reporter.step("pages-follow")
                self.following.finish()
            if self.following is not None:
                running.enter_context(InterruptsDeferred())
            self.root, self.placed, self.aside = root, None, applied.aside
            self.own_files, self.own_names = applied.own, names.own

    def _unlock(self, lock: ConnectionLock) -> None:
        self.locked = True
        self.locked = not lock.remove(failed=not self.root)

    def _placed(self, inner: int, private: PrivateNamespaces | None) -> None:
        """Everything is restored, nothing has run: the last moment at which all can be taken back."""
        self.reporter.step("post-restore")
        self.terminals.made()
        root = self._outer(inner, private)
        self.placed = ProcessIdentity.of(root)
        if self.following is not None:
            self.following.watch(self.placed)
        if self.early is not None and (bereft := self.early.stop()):
            self.reporter.warning(f"sessions {sorted(bereft)}: only their leaders have their controlling terminal")
        for pid, code in sorted(self.early.codes.items() if self.early is not None else ()):
            self.reporter.warning(
                f"PID {pid}, which has ended and was not waited for, ended with {code & _SEVEN_BITS}, not {code}"
            )
        pids = handback.outer_pids(root)
        self.pids, self.outer = tuple(pids.values()), pids
        assert self.expected is not None and self.judge is not None
        comparison.compare(self.expected, self.judge, pids, root)
        if self.binds is not None:
            self.binds.bind(pids)
            self.binds.compare(pids)
        if self.filling is not None:
            self.reporter.step("memory")
            self.filling.finish(pids)
        if private is not None and self.names is not None:
            self.names.show(private.init.pid)
        if self.plan.net == "dumped":
            networks.complete(self.manifest.namespaces["net"], pids, self.reporter)
        if self.devices is not None:
            self.devices.reopen(pids, self.judge.holders)
        lateprocfiles.open_late(self.proc_files.late, pids)
        comparison.compare_late(self.proc_files.late, self.judge, pids, root)
        self.restored = RestoredTree(self.images, self.manifest, root, pids, self.reporter, self.terminals.owners)
        self.repairs.mend(self.restored)
        if self.plan.connections:
            self.reporter.step("connections")
        facts = self.hooks.facts | {"pid": root}
        self.connections = handback.HandBack(self.config, self.plan.connections, pids, facts, self.judge.holders).run()
        anew = handback.endings(self.plan.connections)
        as_it_was = [r for r in self.manifest.connections if (r.pid, r.fd) not in anew]
        handback.set_options(as_it_was, pids, self.reporter)
        self._rejoin_groups(pids, private)
        self.terminals.replant(self.reader, pids, self.reporter)
        self.hooks.run("post-restore", pid=root, connections=self.connections)
        if self.following is not None:
            self.following.watched()
        if self.held is not None:
            self.held(self.connections)
        self.register(root)
        if self.following is not None:
            self.following.about_to_run()
        self.holder.adopt(root, private.init.pid if private is not None else 0, self.terminals.ptys, pids, self.images)
        self.reporter.step("resume")

    def _let_go(self, running: ExitStack) -> int | None:
        """`_about_to_run`, not to be interrupted any more, unless the tree has still to get its memory."""
        if self.following is None:
            running.enter_context(InterruptsDeferred())
        return self._about_to_run()

    def _about_to_run(self) -> int | None:
        """Nothing can be taken back any more; who traces the tree, or None: CRIU has ended."""
        self.pipes.close()
        assert self.restored is not None
        self.repairs.release(self.restored)
        devices = self.devices if self.devices is not None and self.devices.needed else None
        if devices is not None:  # the last step that can fail; nothing of the program runs in it
            stopped = self.images.stopped()
            devices.bring_back(self.outer, stopped, lambda: end_tracer(self._tracer()))
        if self.fresh is not None:  # if we are killed from here on the tree must not end for its namespaces
            self.fresh.keep(self.inner_root, ends_with_root=self.holder.ends_with_root)
        self.holder.settle()
        if devices is not None:
            devices.release()
            return None
        return self._tracer()

    def _tracer(self) -> int:
        """Who traces the tree; 0 if that cannot be told."""
        for pid in self.pids:
            with suppress(NoSuchProcess):  # somebody has killed this one
                if tracer := int(read_status(pid)["TracerPid"]):
                    return tracer
        return 0

    def _groups_anew(self, stack: ExitStack) -> str | None:
        """Where CRIU makes those control groups of the tree that are gone, if it is to make any."""
        if not self._at_home or self.plan.pids != "same" or self.holder.needed:
            return None
        yard = stack.enter_context(remade.remade(self.config, self.images, [p.cgroups for p in self.manifest.processes]))
        if yard is None:
            return None
        if yard.made:
            self.reporter.warning(f"control groups that were gone are made again as they were: {', '.join(yard.made)}")
        return yard.path

    @property
    def _at_home(self) -> bool:
        """Whether the tree comes back as itself, to the host from which it went and that has not been started anew since."""
        return self.manifest.host.boot_id == boot_id() and not self.copy

    def _sort_proc_files(self) -> procfiles.Sorted:
        """See to files of /proc that CRIU cannot open as they are, and say what is lost of them."""
        age = self._age()

        def same(pid: int) -> bool:
            return age is not None and running_for(pid, age)

        def in_use(pid: int) -> bool:
            return self.plan.pids == "same" and bool(taken([pid]))

        found = procfiles.sort(self.images, same, in_use)
        for path, pid, fd in found.ended:
            text = f"PID {pid}: {path} (fd {fd}) was of a process outside of the tree, which has ended"
            text += " or cannot be seen from there; reading it says so (ESRCH)"
            self.reporter.warning(text)
        return found

    def _age(self) -> float | None:
        """Seconds since the dump, if the processes around the tree may still be those of then, under the same PIDs."""
        if not self._at_home or self.plan.pids != "same":
            return None
        return time.time() - datetime.fromisoformat(self.manifest.created).timestamp()

    def _rejoin_groups(self, pids: dict[int, int], private: PrivateNamespaces | None) -> None:
        """Back into the control groups that the processes were in, if this is still the same host; not left in our own unit."""
        self._rejoin(pids)
        if not self.holder.needed:
            services = {pids[p.ns_pid]: membership.service_of(p.cgroups) for p in self.manifest.processes if p.ns_pid in pids}
            membership.leave_unit(services | ({private.init.pid: ""} if private is not None else {}))

    def _rejoin(self, pids: dict[int, int]) -> None:
        if not self._at_home:
            return
        wanted = {pids[p.ns_pid]: p.cgroups for p in self.manifest.processes if p.cgroups and p.ns_pid in pids}
        missing = membership.put_back(wanted)
        if missing:
            self.reporter.warning(f"control groups that are gone: {', '.join(missing)}; the tree is in criuctl's")

    def _outer(self, inner: int, private: PrivateNamespaces | None) -> int:
        """Our PID of the process that CRIU, in its PID namespace, calls `inner`."""
        if private is None:
            return inner
        found = pid_in(private.pid_namespace, inner)
        if found is None:
            raise RestoreFailed(f"the restored root, PID {inner} of its namespace, has ended at once")
        return found

    def _expect(
        self,
        judge: Judge,
        theirs: str,
        links: remaps.Provided,
        stack: ExitStack,
    ) -> handover.Expected:
        """Look once more at what CRIU is about to open, where it will."""
        self.judge = judge
        if self.plan.pids == "init":  # CRIU makes the mounts
            self.expected = handover.Expected(files=held_files(self.images))
            return self.expected
        view: int | None = None
        if theirs:
            view = os.open(theirs, os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, view)
        self.expected = handover.expect(self.images, judge, view, links, stack)
        self.binds = OwnBinds(self.images, judge, view, stack)
        return self.expected

    def _open_external(self, stack: ExitStack, judge: Judge) -> dict[str, int]:
        """The files that came from another mount namespace, opened here by path, as far as the tree may have them."""
        if not self.manifest.external:
            return {}
        opened: dict[str, int] = {}
        named = {one.path.lstrip("/"): one for one in held_files(self.images) if one.external}
        with Looks() as looks:
            for external in self.manifest.external:
                flags = os.O_PATH if external.kind == "dir" else os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
                try:
                    with looks.at(external.path) as found:
                        held = named.get(external.key)
                        if held is not None and (refused := judge.objection(replace(held, path=external.path), found, None)):
                            raise RestoreFailed(str(refused), hint=HINT)
                        fd = os.open(f"/proc/self/fd/{found.fd}", flags | os.O_CLOEXEC)
                except OSError as error:
                    raise RestoreFailed(f"{external.path} cannot be opened: {error.strerror}") from error
                stack.callback(os.close, fd)
                opened[external.key] = fd
        return opened

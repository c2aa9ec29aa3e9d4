"""What is made on this host for one restore before CRIU begins, and undone in reverse unless the
tree runs.

Files put back, helper links, namespaces, the firewall lock, control groups, descriptors that CRIU
inherits, terminals for leaders, pages that follow.  `prepare` has the order, with its reasons.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from msgspec import Struct, field
from msgspec.structs import replace

from ..cgroups import recreation
from ..criu import ghostfolders, netimages, procfiles, socketimages, ttyimages
from ..criu.heldfiles import credentials, held_files
from ..criu.lazy import LazyPages
from ..criu.options import RestoreOptions
from ..criu.owners import user_ids
from ..errors import RestoreFailed
from ..files import carried_binaries, fifos, inherited_files, link_remaps
from ..files.permission import HINT, Judge
from ..files.put_back import Applied
from ..files.socket_binds import OwnBinds
from ..files.socket_names import Bindings
from ..namespaces import network_choice
from ..namespaces.plan import last_pid
from ..namespaces.ports import free_pairs, free_ports
from ..namespaces.restore_lock import ConnectionLock
from ..proc.path_control import PathLookup
from ..proc.privatens import PrivateNamespaces
from ..proc.tree import running_for
from ..repairs.base import RestoreImages
from ..repairs.registry import Repairs
from . import hand_back, outcome
from .early_tasks import EarlyTasks, needs_subreaper
from .linked_sockets import LinkedSockets
from .observe import taken
from .page_feeder import FedPages
from .template import KeptPages
from .work import RestoreWork

_CROWD = 32  # processes
_SEVEN_BITS = 0x7F  # what CRIU leaves of an exit code


class Surroundings(Struct, eq=False):
    """The surroundings of one restored tree."""

    work: RestoreWork
    stack: ExitStack  # undoes them in reverse
    kill: Callable[[], None]  # ends what CRIU may have made of the tree
    kept: bool = False  # the tree runs for good: nothing that is part of it is undone
    unlock_failed: bool = False  # the lock on the connections could not be taken down
    applied: Applied | None = None
    names: Bindings | None = None  # of the tree's unix sockets
    links: link_remaps.Provided | None = None
    proc_files: procfiles.Sorted = field(default_factory=procfiles.Sorted)
    # a command that puts CRIU into the tree's namespaces
    prefix: list[str] = field(default_factory=list)
    net: int | None = None  # descriptor of its network namespace, if it is not criuctl's
    private: PrivateNamespaces | None = None  # CRIU will use their PIDs
    fresh: PrivateNamespaces | None = None  # made for the tree
    mount_root: str | None = None  # where CRIU has to find the root, for a tree that is PID 1
    judge: Judge | None = None
    expected: inherited_files.Expected | None = None  # what CRIU is to open by paths
    binds: OwnBinds | None = None  # the tree's unix sockets with paths
    repairs: Repairs = field(default_factory=Repairs)
    linked: LinkedSockets | None = None  # unix sockets that lead to other members of a group
    early: EarlyTasks | None = None
    following: LazyPages | FedPages | KeptPages | None = None  # brings the pages of a lazy restore
    # named pipes that are open here until the tree has them
    pipes: ExitStack = field(default_factory=ExitStack)
    _inherit: dict[str, int] = field(default_factory=dict)  # CRIU's key -> descriptor
    # a command that enters the network namespace alone
    _network: list[str] = field(default_factory=list)

    def prepare(self) -> RestoreOptions:
        """Make everything that CRIU finds, in the order in which one thing needs the other."""
        self._settle_images()
        self._put_files()
        self._bind_names()
        work = self.work
        self.links = self.stack.enter_context(
            link_remaps.provided(
                work.plan.deleted, work.images, work.reader, self.applied_files.own, work.reporter
            )
        )
        work.holder.prepare(work.reader, self.stack, private=work.plan.pids == "private")
        self._enter_namespaces()
        self._lock_connections()  # before any socket of the tree exists
        if work.plan.pids == "init":
            self.mount_root = outcome.mount_point()
            self.prefix += [*outcome.PRIVATE_ROOT, self.mount_root]
        groups = self._make_groups()
        self.stack.callback(self.kill)  # from here on undoing begins with the end of the tree
        self._open_descriptors()
        options = RestoreOptions(
            shell_job=not ttyimages.led_by_device(work.images),
            lazy=work.pages_follow,
            groups=groups,
            inherit=self._inherit,
            root=self.mount_root,
            crowded=len(work.manifest.processes) >= _CROWD,
            mounted_terminals=ttyimages.are_mounted(work.images),
        )
        self._amend_images()
        self._follow_early()
        self._bring_pages()
        self._make_room()
        # Last: between this look at what CRIU opens by paths and CRIU's own is as little time as
        # can be.
        self._expect()
        return replace(options, inherit=self._inherit)

    @property
    def applied_files(self) -> Applied:
        """The files that were put back."""
        assert self.applied is not None
        return self.applied

    def _unless_kept(self, undo: Callable[[], object]) -> None:
        self.stack.callback(lambda: None if self.kept else undo())

    # -- files and names ---------------------------------------------------------------------------

    def _settle_images(self) -> None:
        """Take out of the images what comes back otherwise, or not at all."""
        images, plan = self.work.images, self.work.plan
        if (group := self.work.partners.group) is not None:
            # Once: a second try of this restore finds the queues filled.
            fill, group.filled = not group.filled, True
            self.linked = LinkedSockets.of(images, group.sockets, fill=fill)
            self._inherit |= self.linked.inherit
        socketimages.give_up(images, hand_back.endings(plan.connections), plan.no_interfaces)
        # A file that came along is as it was read, and may have been made shorter just then: CRIU
        # may know another size.  What a copy shares with its original may be written at any moment.
        changed = {
            j.record.path
            for j in plan.files
            if j.verdict in ("grown", "moved-on")
            or j.record.data is not None
            or (self.work.copy and j.record.kind == "written")
        }
        if changed:
            images.forget_sizes(changed)
        self.proc_files = self._sort_proc_files()

    def _sort_proc_files(self) -> procfiles.Sorted:
        """See to files of /proc that CRIU cannot open as they are, and warn of what is lost of
        them.
        """
        age = self.work.age

        def same(pid: int) -> bool:
            return age is not None and running_for(pid, age)

        def in_use(pid: int) -> bool:
            return self.work.plan.pids == "same" and bool(taken([pid]))

        images = self.work.images
        found = procfiles.sort(images, same, in_use, credentials(images))
        for path, pid, fd in found.ended:
            self.work.reporter.warning(
                f"PID {pid}: {path} (fd {fd}) was of a process outside of the tree, which has ended"
                " or cannot be seen from there; reading it says so (ESRCH)"
            )
        return found

    def _put_files(self) -> None:
        work = self.work
        rewound = work.manifest.workspace if work.rewind else None
        # Several copies are restored at the same time.
        mark = work.manifest.id[:8] + (f"-{os.getpid()}" if work.copy else "")
        applied = self.applied = Applied(
            work.reader, mark, rewound.path if rewound is not None else ""
        )
        self._unless_kept(applied.undo)
        work.reporter.step("files")
        applied.apply(work.plan.files)
        for path, made in applied.apart:
            work.reporter.warning(
                f"{path}: was one file with {made}; here they are on two file systems, and so two "
                "files"
            )
        work.images.move_files(applied.own)
        work.images.forget_modes()
        ttyimages.forget_modes(work.images)

    def _bind_names(self) -> None:
        names = self.names = Bindings(self.work.images, self.work.plan.names)
        self._unless_kept(names.undo)
        names.put()

    # -- namespaces, network, control groups
    # ---------------------------------------------------------

    def _enter_namespaces(self) -> None:
        """Find or make the namespaces that the tree comes to, and how CRIU gets in."""
        manifest, plan, images = self.work.manifest, self.work.plan, self.work.images
        if plan.net in ("named", "existing", "shared"):
            self.net, place = network_choice.enter(manifest, plan.net, plan.net_source)
            self.stack.callback(os.close, self.net)
            self.prefix = ["nsenter", f"--net={place}", "--"]
            if network_choice.new(manifest) == "dumped":
                netimages.leave_network(images)
        self._network = list(self.prefix)
        if plan.pids != "private" and plan.net != "private":
            return
        spaces = PrivateNamespaces(
            net=plan.net == "private",
            reserved=images.reserved_ids() | self.proc_files.numbers,
            last=last_pid(manifest.namespaces),
            bind=self.work.holder.shown,
            layers=self.stack.enter_context(
                carried_binaries.laid(plan.files, self.work.reader, user_ids(images))
            ),
            start=self.work.holder.starter,
        )
        fresh = self.fresh = self.stack.enter_context(spaces)
        self._unless_kept(fresh.discard)
        if fresh.net:
            network_choice.lend_addresses(manifest, fresh.init.pid)
        self._network = [*self.prefix, *(fresh.net_entry if fresh.net else [])]
        # A tree that is PID 1 makes its own PID namespace: CRIU must stay outside of any other.
        self.private = None if plan.pids == "init" else fresh
        self.prefix += fresh.net_entry if self.private is None else fresh.entry

    def _lock_connections(self) -> None:
        work = self.work
        fresh = self.net is None and network_choice.is_new(work.plan.net)
        lock = ConnectionLock(work.images, work.reporter, self.net, fresh=fresh)
        self.stack.callback(lambda: self._unlock(lock))
        if work.plan.net == "dumped":  # CRIU makes it, and locks it
            netimages.forget_states(work.images)
        else:
            lock.make(self._network)  # not with libraries that came along
        if not fresh:
            if work.partners.group is not None:
                free_pairs((r for r in work.manifest.connections if r.linked), self.net)
            free_ports(work.manifest.connections, work.images, self.net)

    def _unlock(self, lock: ConnectionLock) -> None:
        self.unlock_failed = True
        self.unlock_failed = not lock.remove(failed=not self.kept)

    def _make_groups(self) -> str | None:
        """Return where CRIU makes those control groups of the tree that are gone, if it is to make
        any.
        """
        work = self.work
        made: str | None = None
        at_home = work.at_home and not work.groups
        if at_home and work.plan.pids == "same" and not work.holder.needed:
            wanted = [p.cgroups for p in work.manifest.processes]
            yard = self.stack.enter_context(recreation.remade(work.config, work.images, wanted))
            if yard is not None:
                made = yard.path
                if yard.made:
                    groups = ", ".join(yard.made)
                    work.reporter.warning(
                        f"control groups that were gone are made again as they were: {groups}"
                    )
        if made is None and (moved := recreation.rejoin_threads(work.images)):
            work.reporter.warning(
                f"threads {sorted(moved)} were in other control groups than their process; they "
                "are in its now"
            )
        return made

    # -- what CRIU is given ------------------------------------------------------------------------

    @property
    def _their_root(self) -> str:
        """Return the root folder of the namespaces made for the tree, "" for criuctl's own."""
        return f"/proc/{self.private.init.pid}/root" if self.private is not None else ""

    def _open_descriptors(self) -> None:
        """Open what CRIU cannot find by a path: files of other mount namespaces, terminals."""
        work = self.work
        creds = credentials(work.images)
        made = self.applied_files.created
        self.judge = Judge.of(
            work.config, work.manifest, creds, authentic=work.authentic, made=made
        )
        self._inherit |= self._open_external(self.judge)
        self._inherit |= work.terminals.open(self.stack, self._their_root)
        self._inherit |= work.streams

    def _open_external(self, judge: Judge) -> dict[str, int]:
        """Open the files that came from another mount namespace by path, as far as the tree may
        have them.
        """
        if not self.work.manifest.external:
            return {}
        opened: dict[str, int] = {}
        named = {one.path.lstrip("/"): one for one in held_files(self.work.images) if one.external}
        with PathLookup() as lookup:
            for external in self.work.manifest.external:
                flags = (
                    os.O_PATH
                    if external.kind == "dir"
                    else os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
                )
                try:
                    with lookup.at(external.path) as found:
                        held = named.get(external.key)
                        if held is not None:
                            refused = judge.objection(
                                replace(held, path=external.path), found, None
                            )
                            if refused:
                                raise RestoreFailed(str(refused), hint=HINT)
                        fd = os.open(f"/proc/self/fd/{found.fd}", flags | os.O_CLOEXEC)
                except OSError as error:
                    raise RestoreFailed(
                        f"{external.path} cannot be opened: {error.strerror}"
                    ) from error
                self.stack.callback(os.close, fd)
                opened[external.key] = fd
        return opened

    def _amend_images(self) -> None:
        work = self.work
        asked = RestoreImages(
            work.images, work.reporter, self.stack, work.age, in_session=work.holder.needed
        )
        self.repairs.amend_restore(asked)
        self._inherit |= asked.inherit

    def _follow_early(self) -> None:
        """Follow CRIU's forks where processes must be given something before they have children."""
        work = self.work
        space = self.private.pid_namespace if self.private is not None else None
        codes = {pid: code for pid, code in work.images.exit_codes().items() if code > _SEVEN_BITS}
        subreaper = needs_subreaper(work.images)
        root = work.images.pids()[0]
        early = EarlyTasks(root, work.terminals.controlling(), subreaper, space, codes)
        if early.terminals or early.subreaper or codes:
            self.stack.callback(early.stop)
            self.early = early

    def _bring_pages(self) -> None:
        """Start what brings the memory of a lazy restore."""
        work = self.work
        if not work.pages_follow:
            return
        if work.partners.template is not None:
            self.following = self.stack.enter_context(work.partners.template.pages(work.folder))
        elif work.partners.feeder is None:
            assert work.lazy is not None
            self.following = self.stack.enter_context(LazyPages(work.folder, work.lazy))
        else:
            self.following = self.stack.enter_context(work.partners.feeder.pages())

    def _make_room(self) -> None:
        """Remove deleted files and folders that a killed restore of this session has left, and
        would meet again.
        """
        images, holder = self.work.images, self.work.holder
        folders = ghostfolders.arrange(images, own_mounts=self.work.plan.pids == "init")
        self._unless_kept(lambda: outcome.remove_folders(folders))
        ghosts = images.number_ghosts(holder.session)
        outcome.remove_ghosts(ghosts)
        self._unless_kept(lambda: outcome.remove_ghosts(ghosts))

    def _expect(self) -> None:
        """Look once more at what CRIU is about to open, where it will, and hand over descriptors of
        it.
        """
        work, judge = self.work, self.judge
        assert judge is not None and self.links is not None
        if work.plan.pids == "init":  # CRIU makes the mounts
            self.expected = inherited_files.Expected(files=held_files(work.images))
        else:
            view: int | None = None
            if self._their_root:
                view = os.open(self._their_root, os.O_PATH | os.O_CLOEXEC)
                self.stack.callback(os.close, view)
            self.expected = inherited_files.expect(work.images, judge, view, self.links, self.stack)
            self.binds = OwnBinds(work.images, judge, view, self.stack)
        self.stack.enter_context(self.pipes)
        self.pipes.enter_context(
            fifos.settled(
                work.images,
                work.manifest,
                work.reporter,
                self._their_root,
                copy=work.copy,
                places=self.expected.places(),
            )
        )
        self._inherit |= inherited_files.hand_over(
            work.images, self.expected, reachable=not self._their_root
        )

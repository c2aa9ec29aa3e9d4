"""Decide which files a restored process may get by a path.

A name does not prove which file it leads to at the time of the restore: a user who controls a
folder or link on the way decides that.  RULE: a restore gives no process a file that it could not
have.  Root's processes may open everything; any other gets what is at a recorded path if

1. it is the very inode of the dump (`inode_records`), or was made by this restore; or
2. the process could open it itself, now and in that mode, with its own credentials, over links made
   only by root and its own user.  Where others could have put it there (a folder like /tmp, a
   group's folder, a root process in a user's folder), it must in addition belong to the owner that
   it had at the dump, or to the process's user, and have no second name: then it is not something
   that another user has put in its place; or
3. root has opened it for the program: root alone controls every component of the path, no other
   program can have written the checkpoint (it came from an encrypted store, or straight from
   another host), and owner, group and mode of what is there are not stricter than they were at the
   dump.

That root alone controls a path proves nothing by itself: root may have put a file there that is for
no other user.

What the kernel itself fills (/proc, sysfs, control groups, debugfs) has no inode that proves
anything: what `/proc/PID/mem` is changes with what the process executes.  Only 2 holds for it, and
the process opens it again with its own credentials before it runs (`criuctl.restore.own_files`).

`Judge` does so for one file, at each stage: in the plan (`trust_findings`), right before CRIU opens
it (`inherited_files`), and on what the restored process really holds
(`criuctl.restore.comparison`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from ..checkpoint.file_records import FileRecord, InodeRecord
from ..checkpoint.manifest import Manifest
from ..config import Config
from ..criu.heldfiles import HeldFile, Use, is_bad_flag
from ..errors import Damaged, UntrustedPath
from ..proc import file_access, trustedpath
from ..proc.credentials import Credentials
from ..proc.path_control import Found
from ..proc.trustedpath import Fault, Place
from ..report import Finding
from . import inode_records, kernel_files

CODE = "untrusted-path"
_ROOTS = "owned by root, not writable by others"
HINT = f"Put back what was there at the dump, or have root alone control the path ({_ROOTS})."


class Objection(Struct, frozen=True):
    """Why a process does not get a file."""

    path: str
    use: Use | None  # None: it is in a message on a socket
    fault: Fault

    def __str__(self) -> str:
        holder = f"PID {self.use.pid} ({self.use})" if self.use is not None else "the tree"
        return f"{self.path} is not given back to {holder}: {self.fault.reason}"

    def finding(self) -> Finding:
        """Return the finding for the plan."""
        fd = self.use.number if self.use is not None and self.use.role == "descriptor" else None
        pid = self.use.pid if self.use is not None else None
        hint = f"{HINT} At fault: {self.fault.component}."
        return Finding("error", CODE, str(self), hint, pid, fd)


class Judge(Struct, frozen=True):
    """Judges files of one restore."""

    manifest: Manifest
    known: Mapping[str, InodeRecord]
    records: Mapping[str, FileRecord | InodeRecord]  # path -> what was there at the dump
    holders: Mapping[int, Credentials]  # PIDs in the tree
    # no other program can have written the checkpoint, or all its processes are root's
    certain: bool
    made: Collection[tuple[int, int]] = ()  # device and inode of what this restore has made

    @classmethod
    def of(
        cls,
        config: Config,
        manifest: Manifest,
        holders: Mapping[int, Credentials],
        *,
        authentic: bool,
        made: Collection[tuple[int, int]] = (),
    ) -> Judge:
        """Return the judge of a checkpoint's restore.

        `authentic`: no other program than criuctl can have written it.
        """
        certain = authentic or not any(user.uid for user in holders.values())
        known = inode_records.known(config, manifest)
        records: dict[str, FileRecord | InodeRecord] = {one.path: one for one in manifest.files}
        records |= {one.path: one for one in manifest.inodes}
        return cls(manifest, known, records, holders, certain, made)

    def objection(self, held: HeldFile, found: Found, root: int | None) -> Objection | None:
        """Return why a process that holds `held` may not have what was found at its path; `root` as
        for `PathLookup`.
        """
        wanted = list(_wanted(held, self.holders))
        if kernel_files.is_kernels(found.fd):
            return self._kernels(held, found, wanted)
        unproven = self._unproven(held.path, found, wanted)
        return unproven or self._objection(held.path, found, wanted, root)

    def _kernels(
        self, held: HeldFile, found: Found, wanted: Iterable[tuple[int, int, Use | None]]
    ) -> Objection | None:
        """Return why a process may not have a file that the kernel fills."""
        path = held.path
        for pid, access, use in wanted:
            user = self.holders.get(pid)
            if user is None or user.opens_all:
                continue
            if not found.walked or not file_access.may_open(user, found.walked, access):
                text = f"user {user.uid} may not open it so now, and the kernel fills it"
                return Objection(path, use, Fault(path, text, ""))
            bound = use is None or held.external
            if bound and access and not kernel_files.is_harmless(path, found.fd, access):
                text = "no process can open it again: it is in a message on a socket, or comes "
                text += "from another mount namespace"
                return Objection(path, use, Fault(path, text, ""))
        return None

    def folder_objection(
        self,
        path: str,
        found: Found,
        uses: Iterable[Use],
        root: int | None,
    ) -> Objection | None:
        """Return why nothing may be made in the folder `found` at `path` for the processes of
        `uses`.
        """
        wanted = [(use.pid, os.W_OK | os.X_OK, use) for use in uses]
        return self._unproven(path, found, wanted) or self._objection(path, found, wanted, root)

    def peer_objection(
        self,
        path: str,
        found: Found,
        uses: Iterable[Use],
        root: int | None,
    ) -> Objection | None:
        """Return why the sockets of `uses` may not be connected to the one that was found at
        `path`.
        """
        return self._objection(path, found, [(use.pid, os.W_OK, use) for use in uses], root)

    def _unproven(
        self,
        path: str,
        found: Found,
        wanted: Iterable[tuple[int, int, Use | None]],
    ) -> Objection | None:
        """Return why a process may not have what is at a path of root's; None for any other
        path.
        """
        if found.fault is not None or self.is_same(path, found):
            return None
        change = self._change(path, found.status)
        if change is None:
            return None
        for pid, access, use in wanted:
            user = self.holders.get(pid)
            if user is None or user.uid == 0:
                continue
            if not file_access.may_open(user, found.walked, access):
                return Objection(path, use, Fault(path, f"user {user.uid} {change}", ""))
        return None

    def _change(self, path: str, now: os.stat_result) -> str | None:
        """Return why root may not have opened what is there for the program; None if nothing says
        so.
        """
        record = self.known.get(path) or self.records.get(path)
        if not self.certain and path not in self.known:
            return (
                "may not open it so, and nothing proves that the tree had it: the store is not"
                " encrypted, and this host has not made the checkpoint"
            )
        if record is None or not record.mode:
            return "may not open it so, and it is not the file of the dump"
        then = stat.S_IMODE(record.mode)
        if (now.st_uid, now.st_gid) != (record.uid, record.gid) or then & ~now.st_mode:
            return (
                f"may not open it so, and it is another file than at the dump: {now.st_uid}:"
                f"{now.st_gid} {stat.S_IMODE(now.st_mode):04o}, not {record.uid}:{record.gid} "
                f"{then:04o}"
            )
        return None

    def link_objection(self, held: HeldFile, origin: str, fd: int) -> Objection | None:
        """Return why a process that has `held` open under a deleted name may not have the file
        `fd`.

        No path of it was recorded, so it must be the very inode that CRIU's helper link `origin`
        had at the dump, or one that the process could open if it found it.
        """
        found = Found(fd, os.fstat(fd), None)
        if self.is_same(origin, found):
            return None
        component = trustedpath.component(fd, held.path)
        for pid, access, use in _wanted(held, self.holders):
            user = self.holders.get(pid)
            if user is None:
                continue
            owners = {user.uid, self._owner(origin, user)}
            strange = found.status.st_uid not in owners
            if strange or not file_access.may_open(user, [component], access):
                text = f"user {user.uid} may not open what its other name leads to now"
                return Objection(held.path, use, Fault(held.path, text, ""))
        return None

    def _objection(
        self,
        path: str,
        found: Found,
        wanted: Iterable[tuple[int, int, Use | None]],
        root: int | None,
    ) -> Objection | None:
        if found.fault is None or self.is_same(path, found):
            return None
        judged: set[tuple[Credentials, int]] = set()
        for pid, access, use in wanted:
            user = self.holders.get(pid)
            if user is None or (user, access) in judged:
                continue
            judged.add((user, access))
            if (fault := self._fault(path, found, user, access, root)) is not None:
                return Objection(path, use, fault)
        return None

    def _owner(self, path: str, user: Credentials) -> int:
        """Return the owner at the dump of what was at the path, or `user` if that is not known."""
        record = self.records.get(path)
        return record.uid if record is not None else user.uid

    def is_same(self, path: str, found: Found) -> bool:
        """Return whether it is the very inode of the dump, or one that this restore has made."""
        if (found.status.st_dev, found.status.st_ino) in self.made:
            return True
        record = self.known.get(path)
        return record is not None and inode_records.is_same(record, found.fd, self.manifest)

    def _fault(
        self,
        path: str,
        found: Found,
        user: Credentials,
        access: int,
        root: int | None,
    ) -> Fault | None:
        try:
            with trustedpath.opened(path, root=root, trusted={0, user.uid}) as place:
                if not os.path.samestat(place.status, found.status):
                    return Fault(path, f"{path} changes while it is looked at", "")
                if not file_access.may_open(user, place.walked, access):
                    return _not_allowed(path, user, found, place)
                return place.way_fault and self._strange(path, place.way_fault, user, place)
        except UntrustedPath as error:
            component = str(error.details.get("component", path))
            return Fault(component, f"{error.message}; it is not the file of the dump", "")
        except OSError as error:
            return Fault(path, f"{error.strerror}", "")

    def _strange(self, path: str, way: Fault, user: Credentials, place: Place) -> Fault | None:
        """Return why a file may be another user's, at a path where others can put files."""
        status = place.status
        owners = {user.uid, self._owner(path, user)}
        if status.st_uid not in owners:
            owner = f"it belongs to user {status.st_uid} now and is not the file of the dump"
            return Fault(way.component, f"{owner} ({way.reason})", way.remedy)
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            names = "it has another name and is not the file of the dump"
            return Fault(way.component, f"{names} ({way.reason})", way.remedy)
        return None


def _not_allowed(path: str, user: Credentials, found: Found, place: Place) -> Fault:
    way = found.fault or place.fault
    component, reason = (way.component, f" ({way.reason})") if way is not None else (path, "")
    text = f"user {user.uid} may not open it so, and it is not the file of the dump{reason}"
    return Fault(component, text, "")


def _wanted(held: HeldFile, holders: Iterable[int]) -> Iterable[tuple[int, int, Use | None]]:
    """Yield process, access and use of each that holds it; for a file in a message on a socket, of
    all processes.
    """
    if not held.uses:
        return [(pid, file_access.access_of(held.flags), None) for pid in holders]
    return [(use.pid, _access(use), use) for use in held.uses]


def _access(use: Use) -> int:
    if use.role in ("program", "working folder", "root folder"):
        return os.X_OK
    return file_access.access_of(use.flags)


def check_external(files: Iterable[HeldFile], manifest: Manifest) -> None:
    """Raise `Damaged` if CRIU would open by its name what is marked as inherited."""
    known = {one.key for one in manifest.external}
    for held in files:
        if held.external and held.path.lstrip("/") not in known:
            raise Damaged(
                f"the images have {held.path} inherited, and the manifest does not name it",
                hint="The checkpoint is damaged or not from criuctl.",
            )


def check_flags(files: Iterable[HeldFile]) -> None:
    """Raise `Damaged` if CRIU would make or empty files as it opens them."""
    for held in files:
        if is_bad_flag(held.flags) or any(is_bad_flag(use.flags) for use in held.uses):
            raise Damaged(
                f"the images have {held.path} opened with flags that no open file has",
                hint="The checkpoint is damaged or not from criuctl.",
            )

"""What must be so on two real machines, done by the commands that a user types, and judged by this
machine.

Each check is a method of `Checks` that says in a line what it saw, and raises `VmError` when
something is not as it must be.  They share the machines and nothing else: each starts a session of
its own and ends it, so one that fails does not bring down the next.

Where a fault must hit one certain step, criuctl is held there by its own pause points
(`criuctl.pausepoints`), over a FIFO on the machine; that is all that they do which a user does not.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers.rclone import rclone

from criuctl.session.client.matching import ECHO

from .hold import Hold
from .lab import GAMMA, Lab
from .machine import Machine, VmError, wait_for
from .outside import GUESTS_CALL_US, Observer
from .result import Result, mib

MIB = 48  # of memory that a teller has
PATIENCE = 240.0
MOVING = "10.77.0.50"  # an address that moves along
TELLER = Path(__file__).with_name("teller.py")
CLIENT = """
import socket, sys, time
lines = socket.create_connection((sys.argv[1], 7070), 60).makefile("rwb")
before = 0
for number in range(1 << 30):
    lines.write(b"number\\n"); lines.flush()
    said = int(lines.readline())
    assert said >= before, (said, before)
    before = said
    with open("/run/gamma", "w") as answered: answered.write(str(number + 1))
    time.sleep(0.05)
"""
ASK = """
import socket, sys
server = socket.create_connection((sys.argv[1], 7070), 60)
server.sendall(b"sum\\n")
print(server.makefile().readline())
"""


class Checks:
    """See the module's docstring."""

    def __init__(self, lab: Lab, observer: Observer, result: Result) -> None:
        self.lab, self.observer, self.result = lab, observer, result
        self.alpha, self.beta = lab.both

    def recover(self) -> None:
        """After a check that failed: both machines are up and linked."""
        for machine in self.lab.both:
            if not machine.powered():
                self.reboot(machine)
            machine.cable(plugged=True)

    # -- the parts of checks
    # -------------------------------------------------------------------------------

    @contextmanager
    def session(self, name: str) -> Iterator[str]:
        """A shell on alpha with a teller in the background, and a program in front that has half of
        a line.
        """
        self.alpha.criuctl("run", "--detach", "--name", name, "--", "bash", "--norc", "--noprofile")
        try:
            teller = (
                f"python3 -I /srv/teller.py {name} {GUESTS_CALL_US} {self.observer.port} {MIB} &"
            )
            self.alpha.criuctl("send", name, "--text", teller, "--enter")
            self.observer.wait_heard(name, self.alpha.name)
            self.alpha.criuctl("send", name, "--text", "echo now-$((40 + 2)); cat", "--enter")
            # the terminal reads lines by now
            self.alpha.criuctl("wait", name, "--match", "now-42", "--timeout", "60")
            self.alpha.criuctl("send", name, "--text", "half-")
            self.alpha.criuctl("wait", name, "--match", ECHO, "--timeout", "60")
            yield name
        finally:
            for machine in self.lab.both:
                if machine.powered():
                    machine.sh(
                        f"criuctl kill {name} 2>/dev/null; pkill -9 -f '[t]eller.py {name} '; true"
                    )

    def migrate(self, here: Machine, there: Machine, name: str, *options: str) -> Any:
        """Move it, and see that it is there as it was here."""
        report = here.criuctl("migrate", name, there.url, *options)
        self.lives(there, name)
        return report

    def lives(self, home: Machine, name: str) -> None:
        """It runs on this machine and on no other, and every number was sent once."""
        self.observer.wait_heard(name, home.name)
        wait_for(
            lambda: self.copies(name) == [home.name],
            60,
            f"{name} is on {home.name} alone, not on {self.copies(name)}",
        )
        if self.observer.journey(name)[-1] != home.name:
            raise VmError(
                f"{name} was heard on {self.observer.journey(name)}, last of all not on {home.name}"
            )

    def copies(self, name: str) -> list[str]:
        """The machines that have a process of it, one that is only held included."""
        found = []
        for machine in self.lab.both:
            if machine.powered():
                pids = machine.sh(f"pgrep -f '[t]eller.py {name} '; true").split()
                found += [machine.name] * len(pids)
        return found

    def memory(self, machine: Machine) -> None:
        """The program says, over TCP and from afar if a machine is there, that its memory is what
        it was.
        """
        afar = self.other(machine)
        asker, address = (afar, machine.address) if afar.powered() else (machine, "127.0.0.1")
        said = asker.sh(shlex.join(["python3", "-c", ASK, address])).strip()
        if not said.isdigit():
            raise VmError(f"asked for the sum of its memory, it said {said!r}")

    def other(self, machine: Machine) -> Machine:
        """The machine that this one is not."""
        return self.beta if machine is self.alpha else self.alpha

    def begin_migrate(self, name: str, hold: Hold, variables: str = "") -> subprocess.Popen[str]:
        """From alpha to beta, to be held."""
        return self.alpha.start(
            f"{hold.variables} {variables} criuctl migrate {name} {self.beta.url} -v"
        )

    def cut_at(
        self, step: str, name: str, seconds: float | None, variables: str = ""
    ) -> tuple[int, str, float]:
        """Pull beta's cable when criuctl on alpha is at this step, for so long (``None``: until it
        has ended); how it ended.
        """
        hold = Hold(self.alpha, step)
        command = self.begin_migrate(name, hold, variables)
        try:
            hold.reached(command)
            self.beta.cable(plugged=False)
            began = time.monotonic()
            hold.let_go()
            if seconds is not None:
                time.sleep(seconds)  # how long the cut is, not how long something takes
                self.beta.cable(plugged=True)
            out, err = command.communicate(timeout=PATIENCE)
            return command.returncode, out + err, time.monotonic() - began
        finally:
            hold.let_go()
            self.beta.cable(plugged=True)
            command.kill()
            command.wait()

    def resolve(self, name: str) -> str:
        """Run ``migrate --resolve`` as soon as there is a link, and return its outcome."""
        (answer,) = self.alpha.criuctl("migrate", "--resolve", name)
        if answer["error"]:
            raise VmError(f"resolve: {answer}")
        return str(answer["outcome"])

    def reboot(self, machine: Machine) -> float:
        """Power it on again; the seconds until commands can be run."""
        self.lab.power_on(machine)
        seconds = machine.wait_up()
        self.lab.wait_linked(machine)
        return seconds

    # -- the checks, in the order in which they are made
    # ---------------------------------------------------

    def it_is_set_up_on_both(self) -> str:
        """This checkout, by scripts/setup, at the same time on both."""
        began = time.monotonic()
        begun = [(machine, self.lab.begin_set_up(machine)) for machine in self.lab.both]
        said = [
            self.lab.finish_set_up(machine, process, began).strip().splitlines()[-1]
            for machine, process in begun
        ]
        for machine in self.lab.both:
            machine.write("/srv/teller.py", TELLER.read_text())
            machine.sh("sync")  # plugs will be pulled
        version = self.alpha.criuctl("version")
        self.result.facts["Kernel"] = (
            f"{version['kernel']} {version['arch']}, Python {version['python']}"
        )
        self.result.facts["CRIU"] = f"{version['criu']['version']} ({version['criu']['origin']})"
        self.result.facts["criuctl"] = version["criuctl"]
        if said[0] != said[1]:
            raise VmError(f"they differ: {said}")
        self.beta.sh("criuctl migrate --help >/dev/null")
        return said[0]

    def the_doctor_is_content(self) -> str:
        """No error and no warning on a plain Debian; it says that changed pages are tracked."""
        for machine in self.lab.both:
            answer = machine.criuctl("doctor")
            odd = [f for f in answer["findings"] if f["level"] != "info"]
            if odd or not answer["ok"]:
                raise VmError(f"{machine.name}: {odd}")
        (tracking,) = [f["text"] for f in answer["findings"] if f["code"] == "soft-dirty"]
        if "does not" in tracking:
            raise VmError(tracking)
        return str(tracking)

    def pre_copy_reads_what_was_written_to(self) -> str:
        """Dump with --pre-copy and restore: the kernel's marks are believed, and nothing is lost by
        it.
        """
        with self.session("precopy") as name:
            report = self.alpha.criuctl("dump", name, "--pre-copy")
            rounds = report["precopy"]
            self.result.rounds.append((f"dump of {MIB} MiB, a twentieth rewritten", rounds))
            if (
                len(rounds) < 2
                or rounds[0]["read"] < MIB << 20
                or rounds[1]["read"] > rounds[0]["read"] / 3
            ):
                raise VmError(f"the rounds are {rounds}")
            self.alpha.criuctl("restore", name)
            self.lives(self.alpha, name)
            self.memory(self.alpha)
        read = ", ".join(mib(made["read"]) for made in rounds)
        return (
            f"rounds read {read}; frozen {report['frozen_ms']:.0f} ms; restored, its memory is "
            "what it was"
        )

    def a_live_session_moves_there_and_back(self) -> str:
        """Counter, TCP listener, terminal with half of a line: all of it goes to beta, and comes
        home.
        """
        with self.session("work") as name:
            there = self.migrate(self.alpha, self.beta, name)
            self.memory(self.beta)
            self.beta.criuctl("send", name, "--text", "typed", "--enter")
            self.beta.criuctl("wait", name, "--match", "^half-typed", "--timeout", "60")
            self.beta.criuctl("send", name, "--text", "second-")
            self.beta.criuctl("wait", name, "--match", ECHO, "--timeout", "60")
            back = self.migrate(self.beta, self.alpha, name)
            self.memory(self.alpha)
            self.alpha.criuctl("send", name, "--text", "line", "--enter")
            self.alpha.criuctl("wait", name, "--match", "^second-line", "--timeout", "60")
            if self.observer.journey(name) != [self.alpha.name, self.beta.name, self.alpha.name]:
                raise VmError(f"its journey was {self.observer.journey(name)}")
        for where, report in (("migrate, to beta", there), ("migrate, back to alpha", back)):
            self.result.rounds.append((where, report["precopy"]))
        return "; ".join(
            f"{way}: frozen {report['frozen_ms']:.0f} ms of {report['total_ms'] / 1000:.1f} s, "
            f"{mib(report['bytes']['stored'])} sent"
            for way, report in (("there", there), ("back", back))
        )

    def an_address_moves_along(self) -> str:
        """A client on a third host talks over one connection, before, during and after two
        migrations.
        """
        self.lab.gamma()
        with self.session("address") as name:
            self.alpha.sh(f"ip address add {MOVING}/24 dev wire")
            self.beta.write("/srv/client.py", CLIENT)
            run = f"ip netns exec gamma python3 -I /srv/client.py {MOVING}"
            self.beta.sh(f"setsid {run} </dev/null >/run/gamma.log 2>&1 &")
            self._answered_more()
            keep = ("--keep-address", MOVING, "--connections", "keep")
            for here, there in (self.lab.both, self.lab.both[::-1]):
                report = self.migrate(here, there, name, *keep)
                outcomes = [
                    c["outcome"] for c in report["connections"] if c["peer"].startswith(GAMMA)
                ]
                if outcomes != ["kept"]:
                    raise VmError(f"its connections: {report['connections']}")
                self._answered_more()
                if MOVING in here.sh("ip address show"):
                    raise VmError(f"{here.name} still has {MOVING}")
            answered = self._answered()
            self.beta.sh("pkill -f '[c]lient.py'; true")
            self.alpha.sh(f"ip address delete {MOVING}/24 dev wire")
        return f"one connection, {answered} questions answered, none lost"

    def _answered(self) -> int:
        return int(self.beta.sh("cat /run/gamma 2>/dev/null || echo 0").strip() or 0)

    def _answered_more(self) -> None:
        enough = self._answered() + 10

        def more() -> bool:
            if not self.beta.sh("pgrep -f '[c]lient.py'; true"):
                raise VmError(f"the client has ended: {self.beta.sh('cat /run/gamma.log')}")
            return self._answered() > enough

        wait_for(more, 90, "the client on a third host is answered")

    def the_link_is_cut_for_a_second(self) -> str:
        """It is not noticed: the session moves."""
        with self.session("cut1") as name:
            code, said, seconds = self.cut_at("hand-over", name, 1)
            if code != 0:
                raise VmError(f"exit {code}: {said}")
            self.lives(self.beta, name)
        return f"it moved, {seconds:.0f} s after the cut"

    def the_link_is_cut_for_half_a_minute(self) -> str:
        """When the source is gone and the word to run is still to be said: criuctl tries again, and
        it moves.
        """
        with self.session("cut30") as name:
            code, said, seconds = self.cut_at("go", name, 30)
            if code != 0:
                raise VmError(f"exit {code}: {said}")
            self.lives(self.beta, name)
        return f"it moved, {seconds:.0f} s after the cut"

    def the_link_is_cut_for_ever(self) -> str:
        """Before the source is ended: it goes on where it was, and nothing is left on the other
        side.
        """
        with self.session("cut") as name:
            code, said, seconds = self.cut_at("hand-over", name, None)
            if code == 0:
                raise VmError(f"exit 0: {said}")
            self.lives(self.alpha, name)
            if self.resolve(name) != "stays":
                raise VmError("it should stay")
            self.lives(self.alpha, name)
            self.migrate(self.alpha, self.beta, name)
        return (
            f"exit {code} after {seconds:.0f} s; it went on at alpha, and moved when the link was "
            "back"
        )

    def the_link_is_cut_for_ever_at_the_worst_moment(self) -> str:
        """Ended here, without the word to run there: it stands still, whole, and the error says so;
        one word lets it run.
        """
        with self.session("worst") as name:
            code, said, seconds = self.cut_at("go", name, None)
            if code != 12 or "--resolve" not in said:
                raise VmError(f"exit {code}: {said}")
            if self.observer.journey(name) != [self.alpha.name]:
                raise VmError(f"it was heard on {self.observer.journey(name)}")
            if self.resolve(name) != "moved":
                raise VmError("it should have moved")
            self.lives(self.beta, name)
        return f"exit 12 after {seconds:.0f} s; `migrate --resolve` let it run at beta"

    def the_power_of_the_target_fails(self) -> str:
        """While it restores: the session goes on where it was, and moves when the machine is there
        again.
        """
        with self.session("target") as name:
            code, said, seconds = self._plug_at("hand-over", name)
            if code in (0, 12):
                raise VmError(f"exit {code}: {said}")
            self.lives(self.alpha, name)
            booted = self.reboot(self.beta)
            self.migrate(self.alpha, self.beta, name)
        return (
            f"exit {code} after {seconds:.0f} s; it went on at alpha, and moved after beta's boot "
            f"of {booted:.0f} s"
        )

    def the_power_of_the_target_fails_at_the_worst_moment(self) -> str:
        """The source is ended, the target held the session: its checkpoint is on the target's disk,
        and runs after its boot.
        """
        with self.session("durable") as name:
            code, said, _ = self._plug_at("go", name)
            if code != 12:
                raise VmError(f"exit {code}: {said}")
            if self.copies(name):
                raise VmError(f"there are copies on {self.copies(name)}")
            booted = self.reboot(self.beta)
            if self.resolve(name) != "moved":
                raise VmError("it should have moved")
            self.lives(self.beta, name)
            self.memory(self.beta)
        return f"exit 12; after beta's boot of {booted:.0f} s `migrate --resolve` let it run there"

    def _plug_at(self, step: str, name: str) -> tuple[int, str, float]:
        """Pull beta's plug when criuctl on alpha is at this step; how criuctl ended."""
        hold = Hold(self.alpha, step)
        command = self.begin_migrate(name, hold)
        try:
            hold.reached(command)
            self.beta.pull_plug()
            began = time.monotonic()
            hold.let_go()
            out, err = command.communicate(timeout=PATIENCE)
            return command.returncode, out + err, time.monotonic() - began
        finally:
            hold.let_go()
            command.kill()
            command.wait()

    def the_power_of_the_source_fails_after_a_dump(self) -> str:
        """A dump to S3 answers; at once the source is gone, with its disk: the session goes on at
        the other machine.
        """
        with rclone() as server, self.session("lost") as name:
            bucket = server.endpoint.replace("127.0.0.1", GUESTS_CALL_US)
            variables = (
                f"AWS_ENDPOINT_URL={bucket} AWS_ACCESS_KEY_ID={server.access_key} "
                f"AWS_SECRET_ACCESS_KEY={server.secret_key}"
            )
            environment = (
                f"export {variables} AWS_DEFAULT_REGION=us-east-1 CRIUCTL_STORE=s3://sessions/vm; "
            )
            (server.data / "sessions").mkdir()
            self.alpha.sh(environment + "criuctl store init")
            key = self.alpha.sh(
                environment
                + "criuctl store key --export /root/store.key >/dev/null && cat /root/store.key"
            )
            self.beta.write("/root/store.key", key, "600")
            report = json.loads(self.alpha.sh(environment + f"criuctl dump {name} --json"))
            self.alpha.pull_plug()
            self.beta.sh(environment + f"CRIUCTL_KEY_FILE=/root/store.key criuctl restore {name}")
            self.observer.wait_heard(name, self.beta.name)
            self.memory(self.beta)
            booted = self.reboot(self.alpha)
            self.lives(self.beta, name)
        return (
            f"{mib(report['bytes']['stored'])} in S3; it went on at beta; alpha came back after "
            f"{booted:.0f} s and has no copy"
        )

    def the_power_of_the_source_fails_and_its_own_disk_has_the_dump(self) -> str:
        """A dump to a folder answers; at once the power goes: after the boot the checkpoint is
        whole.
        """
        with self.session("own") as name:
            self.alpha.criuctl("dump", name)
            self.alpha.pull_plug()
            booted = self.reboot(self.alpha)
            self.alpha.criuctl("restore", name)
            self.lives(self.alpha, name)
            self.memory(self.alpha)
        return f"after a boot of {booted:.0f} s it was restored and went on"

    def nothing_is_left(self) -> str:
        """On neither machine: no process, firewall rule, or open record of a migration."""
        look = [
            "nft list tables | grep CRIU",
            "pgrep -a criu",
            "pgrep -af '[t]eller.py'",
            "ls -A /dev/shm",
            "ls /var/lib/criuctl/moves/out/* 2>/dev/null",
            'grep -lE \'"state": "(receiving|held)"\' /var/lib/criuctl/moves/in/* 2>/dev/null',
        ]
        for machine in self.lab.both:
            left = machine.sh("; ".join([*look, "true"])).split()
            if left:
                raise VmError(f"{machine.name}: {' '.join(left)}")
        return "no process, no firewall rule, no open record"

"""What must be so where systemd runs: timers, units, logins and a reboot, done by the commands that
a user types.

Each check is a method of `SystemdChecks` that says in a line what it saw, and raises `VmError` when
something is not as it must be.  That a session goes on is heard from outside, by the numbers that
it tells.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from .alone import PATIENCE, Alone
from .machine import VmError, wait_for
from .outside import GUESTS_CALL_US, Observer
from .result import Result

MIB = 8  # of memory that a teller has
TELLER = Path(__file__).with_name("teller.py")
PAGE = Path(__file__).resolve().parents[2] / "criuctl/manual/scheduling-and-supervision.md"
UNIT = "/etc/systemd/system/criuctl-supervise@.service"
LOGIND = "[Login]\nKillUserProcesses=yes\nKillExcludeUsers=nobody\n"  # root is spared by default
CONFIG = "events: journald\ntrees:\n  web: {unit: web, labels: {tier: web}}\n"
WEB = """
import time
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.2)
"""
WEB_UNIT = (
    "[Service]\nExecStart=/usr/bin/python3 -I "
    "/srv/web.py\nStandardOutput=append:/var/log/web\nStandardError=inherit\n"
)


class SystemdChecks:
    """See the module's docstring."""

    def __init__(self, lab: Alone, observer: Observer, result: Result) -> None:
        self.lab, self.observer, self.result = lab, observer, result
        self.sigma = lab.sigma

    def recover(self) -> None:
        """After a check that failed: the machine is up, and nothing of the check runs on."""
        if not self.sigma.powered():
            self.lab.power_on()
        tidy = [
            "criuctl schedule remove minutely",
            "systemctl stop web 'criuctl-supervise@*'",
            "criuctl maintenance end --abandon",
        ]
        self.sigma.sh(f"{'; '.join(tidy)}; systemctl reset-failed; true")
        self._kill_all()

    # -- the parts of checks
    # -------------------------------------------------------------------------------

    def _teller(self, name: str, listen: int = 7070) -> str:
        return (
            f"python3 -I /srv/teller.py {name} {GUESTS_CALL_US} {self.observer.port} {MIB} {listen}"
        )

    @contextmanager
    def _session(
        self, name: str, *options: str, listen: int = 7070, command: Sequence[str] = ()
    ) -> Iterator[str]:
        """A session that tells numbers."""
        argv = command or self._teller(name, listen).split()
        self.sigma.criuctl("run", "--detach", "--name", name, *options, "--", *argv)
        try:
            self._goes_on(name)
            yield name
        finally:
            if self.sigma.powered():
                self.sigma.sh(f"criuctl kill {name} 2>/dev/null; true")

    def _kill_all(self) -> None:
        self.sigma.sh("criuctl ls --json | python3 -c 'import json, sys; print(*(s[\"session\"] "
                      "for s in json.load(sys.stdin)))'"
                      " | xargs -rn1 criuctl kill; pkill -9 -f '[t]eller.py'; true")  # fmt: skip

    def _goes_on(self, name: str) -> None:
        """More numbers come."""
        before = len(self.observer.heard(name).numbers)
        wait_for(
            lambda: len(self.observer.heard(name).numbers) >= before + 5,
            PATIENCE,
            f"{name} is heard",
        )

    def _never_stopped(self, name: str) -> None:
        """It goes on, and every number was sent once."""
        self._goes_on(name)
        self.observer.journey(name)

    def _went_back(self, name: str) -> int:
        """It goes on, from where it was once before. Return how many numbers were sent again."""
        self._goes_on(name)
        numbers = self.observer.heard(name).numbers
        jumps = [(before, after) for before, after in pairwise(numbers) if after != before + 1]
        if len(jumps) != 1 or jumps[0][1] > jumps[0][0]:
            raise VmError(
                f"{name}: its numbers went on from {jumps}, and not once from an earlier one"
            )
        return jumps[0][0] + 1 - jumps[0][1]

    def _show(self, unit: str, *properties: str) -> list[str]:
        """Properties of a unit."""
        out = self.sigma.sh(
            f"systemctl show {shlex.join(f'--property={p}' for p in properties)} "
            f"{shlex.quote(unit)}"
        )
        values = dict(line.split("=", 1) for line in out.splitlines())
        return [values[p] for p in properties]

    def _journal(self, *matches: str) -> list[str]:
        """What criuctl has logged to the journal in this boot."""
        out = self.sigma.sh(f"journalctl -b -t criuctl -o json {shlex.join(matches)}")
        return [json.loads(line)["MESSAGE"] for line in out.splitlines()]

    def _gone(self, process: subprocess.Popen[str]) -> None:
        """A login is over, by its client's end or by the loss of it; logind has seen to what was in
        it.
        """
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE)
        sessions = "loginctl list-sessions --no-legend | grep -v manager || true"
        wait_for(
            lambda: not self.sigma.sh(sessions).strip(), PATIENCE, "logind has closed the login"
        )

    # -- the checks, in the order in which they are made
    # ---------------------------------------------------

    def it_is_set_up(self) -> str:
        """This checkout, by scripts/setup, logins as Debian has them, and events to the journal."""
        self.lab.set_up(self.sigma)
        self.lab.install_logins()
        self.sigma.sh("mkdir -p /etc/criuctl /etc/systemd/logind.conf.d")
        files = {
            "/srv/teller.py": TELLER.read_text(),
            "/srv/web.py": WEB,
            "/etc/systemd/system/web.service": WEB_UNIT,
        }
        files |= {
            "/etc/criuctl/config.yaml": CONFIG,
            "/etc/systemd/logind.conf.d/kill.conf": LOGIND,
            UNIT: supervised(),
        }
        for path, text in files.items():
            self.sigma.write(path, text)
        self.sigma.sh("systemctl daemon-reload && systemctl reload systemd-logind && sync")
        version = self.sigma.criuctl("version")
        self.result.facts["Kernel"] = (
            f"{version['kernel']} {version['arch']}, Python {version['python']}"
        )
        self.result.facts["systemd"] = self.sigma.sh("systemctl --version").splitlines()[0]
        self.result.facts["CRIU"] = f"{version['criu']['version']} ({version['criu']['origin']})"
        return (
            f"criuctl {version['criuctl']}; logind ends what a login leaves behind "
            "(KillUserProcesses=yes), root's too"
        )

    def a_session_outlives_its_login(self) -> str:
        """One that was started in a login, one whose client was lost, and a tree that was restored
        in one.
        """
        quiet = "</dev/null >/dev/null 2>&1 &"
        begin = f"setsid {self._teller('loose', 7071)} {quiet} loose=$!; setsid sleep 86400 {quiet}"
        detached = f"criuctl run --detach --name stays -- {self._teller('stays')}"
        stored = "criuctl dump $loose --name loose && criuctl restore loose"
        login = self.sigma.login(f"{begin} {detached}; sleep 5; {stored}")
        out, err = login.communicate(timeout=PATIENCE)
        if login.returncode != 0:
            raise VmError(f"in the login: exit {login.returncode}: {out}{err}")
        lost = self.sigma.login(
            f"criuctl run --name attached -- {self._teller('attached', 7072)}", terminal=True
        )
        self._goes_on("attached")
        self._gone(lost)
        wait_for(
            lambda: not self.sigma.sh("pgrep -x sleep -a | grep 86400; true"),
            PATIENCE,
            "logind has ended what was left",
        )
        for name in ("stays", "attached", "loose"):
            self._never_stopped(name)
        self._kill_all()
        return (
            "three go on after their logins, which logind has emptied: detached, its client lost, "
            "restored without a holder"
        )

    def a_schedule_is_a_timer(self) -> str:
        """systemd calls it each minute, its run may be stopped, outlives the schedule, and is in
        the journal.
        """
        with self._session("timed") as name:
            self.sigma.criuctl(
                "schedule", "add", "minutely", name, "--every", "1m", "--keep-last", "2"
            )
            service = "criuctl-schedule-minutely.service"

            def ran() -> bool:
                (row,) = self.sigma.criuctl("schedule", "list")
                result: str = (row["last"] or {}).get("result", "running")
                if row["missing"] or result not in ("running", "ok"):
                    raise VmError(f"the schedule is {row}")
                return result == "ok"

            wait_for(ran, PATIENCE, "the timer has called it")
            lines = self._journal(f"CRIUCTL_SESSION={name}", "CRIUCTL_OPERATION=snapshot")
            if not lines or "done" not in lines[0]:
                raise VmError(f"the journal has {lines}")
            wait_for(
                lambda: self._show(service, "ActiveState") == ["inactive"],
                PATIENCE,
                "the run is over",
            )
            self.sigma.sh(f"systemctl start --no-block {service}")
            wait_for(
                lambda: self._show(service, "ActiveState") == ["activating"],
                PATIENCE,
                "another run is under way",
            )
            self.sigma.sh(f"systemctl stop {service}")
            self._never_stopped(name)
            self.sigma.sh(f"systemctl reset-failed {service}; systemctl start --no-block {service}")
            main = f"systemctl kill --kill-whom=main {service} --signal="
            wait_for(
                lambda: self._show(service, "MainPID") != ["0"], PATIENCE, "a run is under way"
            )
            self.sigma.sh(f"{main}STOP")  # lest it is over before it is looked at
            try:
                self.sigma.criuctl("schedule", "remove", "minutely")
                state, patience = self._show(service, "ActiveState", "TimeoutStartUSec")
                if (state, patience) != ("activating", "infinity"):
                    raise VmError(
                        f"the run that outlives its schedule: {state}, ended by systemd after "
                        f"{patience}"
                    )
            finally:
                self.sigma.sh(f"{main}CONT; true")
            wait_for(
                lambda: self._show(service, "ActiveState") != ["activating"],
                PATIENCE,
                "the last run is over",
            )
            left = self.sigma.sh(
                "find /etc/systemd /run/systemd -name 'criuctl-schedule*'; systemctl is-failed "
                f"{service}; true"
            )
            if left.split() != ["inactive"]:
                raise VmError(f"left of it: {left}")
            self._never_stopped(name)
        return (
            f"`{lines[0]}` in the journal; a run that was stopped, and one that outlived its "
            "schedule, left the session as it was"
        )

    def a_service_is_a_tree(self) -> str:
        """One that the configuration names by its unit: snapshot, dump, restore."""
        self.sigma.sh("systemctl start web")
        number = "tail -n 1 /var/log/web"
        wait_for(
            lambda: self.sigma.sh(f"{number} 2>/dev/null; true").strip(),
            PATIENCE,
            "the service writes",
        )
        (taken,) = self.sigma.criuctl("snapshot", "--label", "tier=web")
        if self._show("web.service", "ActiveState") != ["active"]:
            raise VmError("the snapshot has ended the service")
        report = self.sigma.criuctl("dump", "web")
        # the unit's control group is gone with the unit
        self.sigma.sh("criuctl restore web || [ $? = 11 ]")
        before = int(self.sigma.sh(number))
        wait_for(
            lambda: int(self.sigma.sh(number)) > before + 5, PATIENCE, "the restored service writes"
        )
        lines = [int(line) for line in self.sigma.sh("cat /var/log/web").split()]
        if lines != list(range(1, len(lines) + 1)):
            raise VmError(f"it has written {lines[-40:]}")
        group = self.sigma.sh("cat /proc/$(pgrep -f '[w]eb.py')/cgroup").strip()
        self.sigma.sh("criuctl kill web; systemctl reset-failed web; true")
        return (
            f"frozen {taken['frozen_ms']:.0f} and {report['frozen_ms']:.0f} ms; restored in "
            f"{group}, no line lost or twice"
        )

    def a_supervised_session_comes_back(self) -> str:
        """The unit of the manual: kill -9 of the whole session, of the supervisor; its restart and
        its stop end nothing.
        """
        with self._session("kept") as name:
            unit = f"criuctl-supervise@{name}.service"
            self.sigma.sh(f"systemctl start {unit}")
            self._stored(name)
            self.sigma.sh(
                f"kill -9 $(cat $(find /sys/fs/cgroup/system.slice/criuctl-{name}-*.scope "
                "-name "
                "cgroup.procs))"
            )
            wait_for(
                lambda: self._journal(f"CRIUCTL_SESSION={name}", "CRIUCTL_OPERATION=restore"),
                PATIENCE,
                "it is restored",
            )
            again = self._went_back(name)
            self.sigma.sh(f"systemctl kill --kill-whom=main --signal=KILL {unit}")
            wait_for(
                lambda: self._show(unit, "NRestarts", "ActiveState") == ["1", "active"],
                PATIENCE,
                "systemd has started it again",
            )
            self.sigma.sh(f"systemctl restart {unit} && systemctl stop {unit}")
            if self._went_back(name) != again:
                raise VmError("it went back again when its supervisor was ended")
            log = (
                self.sigma.sh(f"journalctl -b -u {unit} -o cat | grep recovered:")
                .strip()
                .splitlines()
            )
        return (
            f"{log[0].split('recovered: ')[-1]}: {again} numbers sent again; supervisor killed, "
            "restarted, stopped: it goes on"
        )

    def _stored(self, name: str) -> None:
        """Wait until there is a checkpoint of it."""
        listed = f"criuctl list {name} 2>/dev/null; true"  # nothing, and 3, while there is none
        wait_for(
            lambda: self.sigma.sh(listed).strip(), PATIENCE, f"a checkpoint of {name} is stored"
        )

    def a_reboot_brings_all_back(self) -> str:
        """`maintenance begin`, `systemctl reboot`, and the unit of `recover --install` at the
        boot.
        """
        self.sigma.criuctl("recover", "--install")
        self.sigma.sh("rm -f /var/log/web; systemctl start web")
        with (
            self._session("base", "--label", "order=10", listen=7071) as base,
            self._session("work") as work,
        ):
            stored = self.sigma.criuctl("maintenance", "begin", "--reason", "new kernel")
            if {item["session"]: item["state"] for item in stored} != dict.fromkeys(
                ("base", "work", "web"), "stored"
            ):
                raise VmError(f"stored was {stored}")
            refused = self.sigma.sh("criuctl run --detach -- true; echo $?").strip()
            if refused != "9":
                raise VmError(f"a session that may not begin: exit {refused}")
            down = self.sigma.reboot()
            seconds = self.lab.power_on()
            for name in (base, work):
                self._never_stopped(name)
            wait_for(
                lambda: self._show("criuctl-recover.service", "ActiveState") == ["inactive"],
                PATIENCE,
                "recover is done",
            )
            result, code = self._show("criuctl-recover.service", "Result", "ExecMainStatus")
            if result != "success" or self.sigma.criuctl("maintenance", "status")["maintenance"]:
                raise VmError(
                    f"recover: {result}, exit {code}: "
                    f"{self.sigma.sh('journalctl -b -u criuctl-recover --no-pager')}"
                )
            order = [
                line.split()[1].split("@")[0].rstrip(":")
                for line in self._journal("CRIUCTL_OPERATION=restore")
            ]
            if order[:1] != [base]:
                raise VmError(f"they came back in the order {order}")
            self.sigma.sh(
                "systemctl restart criuctl-recover.service; systemctl stop criuctl-recover.service"
            )
            for name in (base, work):
                self._never_stopped(name)
            lines = [int(line) for line in self.sigma.sh("cat /var/log/web").split()]
            if lines != list(range(1, len(lines) + 1)) or not self.sigma.sh(
                "pgrep -f '[w]eb.py'; true"
            ):
                raise VmError(f"the service has written {lines[-40:]}")
            self.sigma.sh("criuctl kill web")
        times = f"down in {down:.0f} s, up in {seconds:.0f} s"
        return (
            f"{times}: two sessions and a service went on, none lost a number; recover ended with "
            f"{code}"
        )

    def a_reboot_without_preparation(self) -> str:
        """No maintenance: `recover --all`, and a supervisor that is started at the boot, from the
        newest checkpoints.
        """
        self.sigma.sh("criuctl recover --remove; true")
        self.sigma.criuctl("recover", "--install", "--all")
        # it ends by itself when it is asked to
        orderly = ("sh", "-c", f"trap 'exit 0' TERM; {self._teller('polite')} & wait")
        with (
            self._session("polite", command=orderly) as polite,
            self._session("held", listen=7071) as held,
        ):
            self.sigma.criuctl("snapshot", polite)
            self.sigma.sh(f"systemctl enable --now criuctl-supervise@{held}.service")
            self._stored(held)
            down = self.sigma.reboot()
            for name in (polite, held):
                self.observer.forget(name)
            seconds = self.lab.power_on()
            for name in (polite, held):
                self._never_twice(name)
            self.sigma.sh(f"systemctl disable --now criuctl-supervise@{held}.service")
            self._never_twice(held)
        self.sigma.criuctl("recover", "--remove")
        return (
            f"down in {down:.0f} s, up in {seconds:.0f} s: both went on, one by `recover --all`, "
            "one with its supervisor"
        )

    def _never_twice(self, name: str) -> None:
        """It goes on, and since it was forgotten nothing was sent twice or left out."""
        self._goes_on(name)
        numbers = self.observer.heard(name).numbers
        if odd := [(before, after) for before, after in pairwise(numbers) if after != before + 1]:
            raise VmError(f"{name}: its numbers went on from {odd}")

    def nothing_is_left(self) -> str:
        """No process, firewall rule, unit or open record."""
        look = [
            "nft list tables | grep CRIU",
            "pgrep -a criu",
            "pgrep -af '[t]eller.py'",
            "ls -A /dev/shm",
            "systemctl list-units --all --plain --no-legend 'criuctl-*.service' "
            "'criuctl-*.timer' 'criuctl-*.scope'",
            "find /etc/systemd/system /run/systemd -name 'criuctl-*' ! -name "
            "criuctl-supervise@.service",
            "criuctl maintenance status -q",
        ]
        left = self.sigma.sh("; ".join([*look, "true"])).strip()
        if left:
            raise VmError(left)
        return "no process, no firewall rule, no unit, no open record"


def supervised() -> str:
    """The unit that the manual shows, with snapshots often enough for a check."""
    text = (
        PAGE.read_text()
        .split("# /etc/systemd/system/criuctl-supervise@.service\n")[1]
        .split("```")[0]
    )
    return text.replace("--every 1min", "--every 30s")

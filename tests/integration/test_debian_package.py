"""The Debian package: built, installed by dpkg, used and removed, in a mount namespace in which
this host's folders are covered by overlays.

pip uses the package index that this machine is configured for, as scripts/setup does.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.command import PROJECT, Home

_BUILD, _TIMEOUT = 900, 600  # seconds for what takes one minute and ten seconds on an idle machine
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(_BUILD + _TIMEOUT + 60),
]

_COVER = """
set -e
package=$1 covers=$2; shift 2
mount --make-rprivate /
mount -t tmpfs tmpfs "$covers"
for folder in usr etc var; do
    mkdir -p "$covers/$folder/upper" "$covers/$folder/work"
    mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$covers/$folder/upper" \\
        -o "workdir=$covers/$folder/work" "/$folder"
done
cd /
"""
# without the triggers: one indexes all manual pages of the host
_USE = """
dpkg --no-triggers --install "$package" >&2
/usr/bin/criuctl doctor --json >"$out/doctor"
/usr/bin/criuctl --json run -d --name first -- sleep 600 >"$out/run"
/usr/bin/criuctl dump first --json >"$out/dump"
/usr/bin/criuctl restore first --json >"$out/restore"
/usr/bin/criuctl kill first
/usr/bin/criuctl metrics >"$out/metrics"
env -u CRIUCTL_STATE_DIR /usr/bin/criuctl unit list --json >"$out/units"
systemd-analyze verify --man=no criuctl-recover.service criuctl-spot.service criuctl-ui.service \\
    criuctl-ui-read-only.service criuctl-supervise@.service >"$out/verify" 2>&1
MANPATH=/usr/share/man man criuctl-dump >"$out/page"
bash -n /usr/share/bash-completion/completions/criuctl
dpkg --verify criuctl >"$out/changed"
echo "gc_grace: 2d" >>/etc/criuctl/config.yaml
dpkg --no-triggers --remove criuctl >&2
! command -v /usr/bin/criuctl
! ls /usr/lib/criuctl 2>"$out/removed"
grep -q gc_grace /etc/criuctl/config.yaml
dpkg --no-triggers --purge criuctl >"$out/purged"
! cat /etc/criuctl/config.yaml 2>/dev/null
"""


def test_it_installs_works_and_goes(home: Home) -> None:
    subprocess.run([PROJECT / "scripts/build-deb", "--out", home.path], check=True, timeout=_BUILD)
    (package,) = home.path.glob("criuctl_*.deb")
    for name in ("out", "covers"):
        (home.path / name).mkdir()
    folders = {
        **{f"CRIUCTL_{n}_DIR": home.path / n for n in ("STATE", "CACHE", "KEY")},
        "CRIUCTL_STORE": home.path / "store",
        "CRIUCTL_RUN_DIR": home.run,
        "CZOO_TOKEN": home.token,
        "out": home.path / "out",
    }
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _COVER + _USE, "sh", package, home.path / "covers"],
        env=kept | {name: str(path) for name, path in folders.items()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {path.name: path.read_text() for path in (home.path / "out").iterdir()}
    assert json.loads(said["doctor"])["ok"]
    assert json.loads(said["run"])["warnings"] == []
    assert json.loads(said["restore"])["incarnation"] == 2
    assert "criuctl_build_info" in said["metrics"]
    assert all(one["current"] for one in json.loads(said["units"]))
    assert said["verify"] == said["changed"] == ""
    assert "criuctl-dump - store a live process tree" in said["page"]
    assert not Path("/usr/lib/criuctl").exists(), "the host itself has none of it"

"""scripts/lint next to the tests: types are checked at the lowest priority while tests wait for
other things.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
AHEAD = "types"  # the check that takes the longest


class Check:
    """One check that runs."""

    def __init__(self, name: str, *, patient: bool = False) -> None:
        """`patient`: it has time."""
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `result`
        self._process = subprocess.Popen(
            [*(["nice", "-n", "19"] if patient else []), CHECKOUT / "scripts/lint", name],
            env=os.environ | {"LINT_BIN": os.path.dirname(sys.executable)},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def result(self, timeout: float) -> tuple[int, str]:
        """Its exit code and what it said."""
        with self._output as output:
            try:
                code = self._process.wait(timeout)
            finally:
                self.end()
            output.seek(0)
            return code, output.read()

    def end(self) -> None:
        """Let it not outlive the tests."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()

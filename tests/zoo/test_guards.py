"""Every zoo test fails when the line that guards against its fault is taken away (see `guards.py`)."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.zoo import guards


def test_every_lines_tests_fail_without_their_guard() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.zoo.guards"],
        cwd=guards.TESTS.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    codes = json.loads(done.stdout)
    missed = [(guard.line, guard.guard, code) for guard, code in zip(guards.GUARDS, codes, strict=True) if code != 1]
    assert not missed, "tests that pass, or do not run, without their guard"

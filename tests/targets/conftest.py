"""Everything here runs with the compiled part, where the package was installed with it, and without."""

from __future__ import annotations

from typing import Any

import pytest

from stepbind.targets.atom import kept, memory, shared, usual
from stepbind.targets.atom.native import native


@pytest.fixture(autouse=True, params=["compiled", "without a compiler"])
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "compiled":
        if native is None:
            pytest.skip("installed without a C compiler")
        return True
    for module in (kept, memory, shared, usual):
        monkeypatch.setattr(module, "native", None)
    return False


@pytest.fixture
def compiled_alone(is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip("about the compiled part")

"""The compiled part (`csrc`): None where the package was installed without a C compiler; all works without."""

from __future__ import annotations

try:
    from stepbind.targets.atom import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

__all__ = ["native"]

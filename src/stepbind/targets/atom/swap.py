"""Putting the three classes in the place of ATOM's own bridge, and taking them out again."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from stepbind.targets.atom.context import RTPForwardContext, RTPForwardMLAContext, RTPForwardQwen35HybridContext

BRIDGE = "atom.plugin.rtpllm.utils.forward_context"
OURS = {each.__name__: each for each in (RTPForwardContext, RTPForwardMLAContext, RTPForwardQwen35HybridContext)}

_replaced: list[tuple[Any, str, Any]] = []  # (module, name, what was there)


def install() -> None:
    """From now on ATOM's runtime uses the classes of this package: in the bridge's module and in every ATOM module that
    imported them from there. Runtimes that exist keep what they have, so call this before a model is made. Calling it
    again does nothing.

    Raises `ImportError` where ATOM has no such bridge.
    """
    if _replaced:
        return
    bridge = importlib.import_module(BRIDGE)
    theirs = {name: getattr(bridge, name) for name in OURS}
    for module in list(sys.modules.values()):
        if module is None or not getattr(module, "__name__", "").startswith("atom."):
            continue
        for name, value in list(vars(module).items()):
            for replaced, original in theirs.items():
                if value is original:
                    _replaced.append((module, name, value))
                    setattr(module, name, OURS[replaced])


def uninstall() -> None:
    """Undo `install`, in reverse order."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)

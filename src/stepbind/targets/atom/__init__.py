"""ATOM as a target: RTP-LLM's passes for ATOM's own layers, in the place of ATOM's bridge."""

from stepbind.targets.atom.context import RTPForwardContext, RTPForwardMLAContext, RTPForwardQwen35HybridContext
from stepbind.targets.atom.metadata import (
    AiterFlashAttentionMetadataForPluginMode,
    AiterFlashAttentionPhaseMetadata,
    Profile,
)
from stepbind.targets.atom.swap import install, uninstall
from stepbind.targets.atom.values import GroupValues

__all__ = [
    "AiterFlashAttentionMetadataForPluginMode",
    "AiterFlashAttentionPhaseMetadata",
    "GroupValues",
    "Profile",
    "RTPForwardContext",
    "RTPForwardMLAContext",
    "RTPForwardQwen35HybridContext",
    "install",
    "uninstall",
]

"""A double of ATOM: the classes and ambient-context functions that a bridge from RTP-LLM imports, holding data only."""

from tests.targets.atom_double.modules import atom_installed, reference_module

__all__ = ["atom_installed", "reference_module"]

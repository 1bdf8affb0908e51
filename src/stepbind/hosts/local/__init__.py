"""A local host: block pools, continuous batching and sampling around one transformers model."""

from stepbind.hosts.local.engine import LocalEngine
from stepbind.hosts.local.options import EngineOptions
from stepbind.hosts.local.request import Completion, Delta, SamplingParams

__all__ = ["Completion", "Delta", "EngineOptions", "LocalEngine", "SamplingParams"]

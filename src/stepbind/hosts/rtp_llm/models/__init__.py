"""What RTP-LLM loads with `--external_model_packages stepbind.hosts.rtp_llm.models`: every family that stepbind knows,
as the model type "stepbind".

Importing this registers the model type, which only works in a process that has RTP-LLM.
"""

from __future__ import annotations

try:
    from rtp_llm.model_factory_register import register_model
except ImportError as error:
    raise ImportError(
        "stepbind.hosts.rtp_llm.models is loaded by RTP-LLM (--external_model_packages) and needs its package rtp_llm, "
        f"which cannot be imported here ({error}). To run a checkpoint without RTP-LLM, use stepbind.LocalEngine."
    ) from error

from stepbind.hosts.rtp_llm.models.model import StepbindModel
from stepbind.hosts.rtp_llm.models.runtime import StepbindRuntime

MODEL_TYPE = "stepbind"
"""What `--model_type` says to choose it. RTP-LLM's own models keep the architectures that they have registered: a
second registration of one is an error there."""

register_model(MODEL_TYPE, StepbindModel, [])

__all__ = ["MODEL_TYPE", "StepbindModel", "StepbindRuntime"]

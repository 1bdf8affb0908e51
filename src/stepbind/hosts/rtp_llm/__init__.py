"""RTP-LLM as a host: its passes read into steps, its cache into groups and views."""

from stepbind.hosts.rtp_llm.binding import RtpBinding
from stepbind.hosts.rtp_llm.reader import read_memory, read_pass
from stepbind.hosts.rtp_llm.steps import StepOptions, step_of

__all__ = ["RtpBinding", "StepOptions", "read_memory", "read_pass", "step_of"]

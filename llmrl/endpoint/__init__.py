"""An OpenAI-compatible server over an engine, which can record the calls of agents as rows to train on."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.endpoint.recording import RecordingEndpoint, Rollout
    from llmrl.endpoint.server import Endpoint
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["Endpoint", "RecordingEndpoint", "Rollout"]

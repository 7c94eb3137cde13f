"""The engine for scripts: ``from services.client import LLM, SamplingParams``.

A caller gets a gateway without HTTP: the same sessions, checks and text, in a thread of its own process. The engine
itself runs in child processes, or is a deployment that is there already. No torch here.
"""

from services.client.llm import LLM
from services.client.outputs import CompletionOutput, RequestOutput, StreamOutput, Usage
from services.client.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StreamOutput", "Usage"]

"""The engine for scripts: ``from services.client import LLM, SamplingParams``.

It is a gateway without HTTP: the same sessions, checks and text, in a thread of the caller's process. The engine itself
runs in child processes, or it is a running deployment. Nothing here imports torch.
"""

from services.client.llm import LLM
from services.client.outputs import CompletionOutput, RequestOutput, StreamOutput, Usage
from services.client.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StreamOutput", "Usage"]

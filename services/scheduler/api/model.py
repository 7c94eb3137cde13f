"""The served model."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

from services.common.errors import NotFound, Unavailable
from services.common.model.files import ModelCard
from services.common.plan.types import WorkerLimits
from services.common.text.encoder import TextEncoder
from services.common.text.thinking import ThinkingTokens
from services.common.text.tokenizer import Tokenizer
from services.scheduler.core.stopping.automaton import Automaton
from tokasaurus.common.v1.sampling_pb2 import Sampling
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2

CONTRACT_VERSION = "1.16"
# Cached automata of stop strings. An automaton of the longest strings takes 60 MB.
_AUTOMATA = 256
_AUTOMATA_BYTES = 128 * 1024 * 1024
_OF_SHAPE = ("max_context_tokens", "max_top_logprobs", "prompt_logprobs", "grammars", "thinking_budgets")


class ServedModel:
    """Properties of the served model. Immutable except for ``shape``, which the worker determines.

    Used on the event loop. The link to the worker calls ``set_shape``.
    """

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, max_samples: int, *, processed_logprobs: bool = False
    ) -> None:
        """``processed_logprobs`` is the default of a request's logprobs_mode."""
        self.processed_logprobs = processed_logprobs
        self.thinking_tokens = ThinkingTokens.of(tokenizer)
        self.card = card
        self.default_sampling = Sampling(**card.defaults.sampling)  # never changed
        self.tokenizer = tokenizer
        self.text = TextEncoder(tokenizer)
        self.max_samples = max_samples
        self.created_unix_s = int(time.time())
        self._shape: WorkerLimits | None = None
        self._automata: OrderedDict[tuple[str, ...], Automaton] = OrderedDict()
        self._automata_bytes = 0

    @property
    def shape(self) -> WorkerLimits:
        """The limits of the worker. Raises ``Unavailable`` until a worker has connected."""
        if self._shape is None:
            raise Unavailable("the worker has not connected yet; try again", reason="NO_WORKER")
        return self._shape

    def set_shape(self, shape: WorkerLimits) -> None:
        self._shape = shape

    def check_name(self, name: str) -> None:
        """Check that ``name`` is empty or a name of the served model. Raises ``NotFound``."""
        if name and name != self.card.name and name not in self.card.aliases:
            raise NotFound(f"model {name!r} is not served here; this is {self.card.name!r}", field="model")

    def automaton(self, strings: Sequence[str]) -> Automaton:
        """Return the automaton of the stop strings."""
        key = tuple(strings)
        if (automaton := self._automata.get(key)) is None:
            automaton = self._automata[key] = Automaton(key)
            self._automata_bytes += automaton.nbytes
        self._automata.move_to_end(key)
        while len(self._automata) > _AUTOMATA or self._automata_bytes > _AUTOMATA_BYTES:
            self._automata_bytes -= self._automata.popitem(last=False)[1].nbytes
        return automaton

    def message(self) -> observe_pb2.Model:
        card, shape = self.card, self.shape
        return observe_pb2.Model(
            id=card.name,
            created_unix_s=self.created_unix_s,
            **{name: getattr(shape, name) for name in _OF_SHAPE},
            vocab_size=card.vocab_size,
            eos_token_ids=card.eos_token_ids,
            has_chat_template=self.tokenizer.has_chat_template,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            contract_version=CONTRACT_VERSION,
            aliases=self.card.aliases,
            root=self.card.root,
            logprobs_mode=generate_pb2.LOGPROBS_MODE_PROCESSED
            if self.processed_logprobs
            else generate_pb2.LOGPROBS_MODE_RAW,
            default_sampling=self.default_sampling,
            default_max_tokens=card.defaults.max_new_tokens,
            routed_experts=None if shape.routed_experts is None else asdict(shape.routed_experts),
        )

"""Attention that the code of a model computes itself, as products of matrices around a softmax.

The code of such a model runs unchanged. While it runs, a ``TorchFunctionMode`` replaces the two products: the scores
become a tensor on the device ``meta``, which takes no memory, and the product with the values becomes the attention of
the worker's step. Before weights are read, a run with known scores shows what the code does between the products.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

# Name of the attention function of these models, in ``config._attn_implementation``. Only masks are made by it.
NAME = "tokasaurus_products"
_IMPLEMENTATION = "_attn_implementation"  # attribute of the configs of transformers
META = torch.device("meta")
_CPU = torch.device("cpu")
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
_SUMS = (torch.baddbmm, torch.Tensor.baddbmm)  # products that are added to a tensor
_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)
_LEAST_DIMENSIONS = 3  # of queries, keys and values
# Most tokens of the run with known scores. Biases that are rounded to bfloat16 differ from a line at 257.
_MOST_TOKENS = 521
# Scores below this have a weight of zero in every precision.
_MASKED = -5e3
_TOLERANCE = 1e-3


class OwnCode(Exception):
    """A property of the model's attention that the worker does not compute."""


@dataclass(frozen=True)
class ProductCall:
    """The attention of one call of ``module``, a module of the model that ran."""

    module: nn.Module
    query: torch.Size  # [1, heads, tokens, size]
    key: torch.Size
    value: torch.Size
    scale: float
    window: int | None
    slopes: tuple[float, ...] | None  # what a step to the next key adds to the score, by head; None = nothing


@dataclass(frozen=True)
class _Operands:
    """The operands of a product, and the tensor to which it is added, if there is one."""

    first: torch.Tensor
    second: torch.Tensor
    added: torch.Tensor | None = None
    beta: float = 1.0
    alpha: float = 1.0


def _operands(function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> _Operands | None:
    """Return the operands of a call of ``function``, or None if it is no product of several pairs of matrices."""
    found = None
    if function in _PRODUCTS:
        found = _Operands(given[0], given[1] if len(given) > 1 else next(iter(named.values())))
    elif function in _SUMS:
        values = dict(zip(("input", "batch1", "batch2"), given, strict=False)) | dict(named)
        factors = values.get("beta", 1.0), values.get("alpha", 1.0)
        found = _Operands(values["batch1"], values["batch2"], values["input"], *factors)
    return found if found is not None and min(found.first.dim(), found.second.dim()) >= _LEAST_DIMENSIONS else None


def tensors_in(given: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments of a call."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from tensors_in(each)
    elif isinstance(given, dict):
        yield from tensors_in(list(given.values()))


def _replaced(given: Any, old: Callable[[Any], bool], new: Callable[[Any], Any]) -> Any:
    """Return the arguments of a call, each for which ``old`` is true replaced by the result of ``new``."""
    if old(given):
        return new(given)
    if isinstance(given, list | tuple) and type(given) in (list, tuple):
        return type(given)(_replaced(each, old, new) for each in given)
    if isinstance(given, dict):
        return {name: _replaced(each, old, new) for name, each in given.items()}
    return given


def _is_meta_device(given: Any) -> bool:
    return isinstance(given, torch.device | str) and str(given) == "meta"


def _on_meta(given: Any) -> Any:
    return _replaced(given, lambda each: isinstance(each, torch.Tensor), lambda each: each.to(META))


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor [..., tokens, size]`` as ``[1, heads, tokens, size]``."""
    return tensor.reshape(1, -1, *tensor.shape[-2:])


def empty_mask(*, batch_size: int, q_length: int, kv_length: int, dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """Return a mask without values, for steps, whose attention has the rules that were found before."""
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=dtype, device=META)


def use_masks(model: Any, name: str) -> None:
    """Make the code of ``model`` ask for the masks that are registered as ``name``."""
    setattr(model.config, _IMPLEMENTATION, name)


class StepProducts(TorchFunctionMode):
    """Replaces the products of the attention modules by the attention of the step. One thread uses it for one step."""

    def __init__(self, attend: Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """``attend(module, query, key, value)`` is the attention function, without batch of several sequences."""
        super().__init__()
        self.module: nn.Module | None = None  # the attention module that runs
        self._attend = attend
        self._query = self._key = torch.empty(0)

    def __torch_function__(
        self, function: Any, types: Collection[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = None if self.module is None else _operands(function, args, kwargs)
        if operands is not None:
            first, second = operands.first, operands.second
            if not first.is_meta:
                self._query, self._key = first, second
                shape = (
                    *torch.broadcast_shapes(first.shape[:-2], second.shape[:-2]),
                    first.shape[-2],
                    second.shape[-1],
                )
                return torch.empty(shape, dtype=first.dtype, device=META)
            return self._product_with_values(first, second)
        if any(each.is_meta for each in tensors_in((args, kwargs))):
            try:
                return function(*_on_meta(args), **_on_meta(kwargs))
            except RuntimeError:
                # A table of the model is smaller than the step. Only the values of the product are used.
                return next(each for each in tensors_in((args, kwargs)) if each.is_meta)
        return function(*args, **kwargs)

    def _product_with_values(self, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert self.module is not None
        query, key, values = (_heads_first(each) for each in (self._query, self._key.mT, value))
        attended = self._attend(
            self.module, query.to(value.dtype), key.to(value.dtype), values
        )  # [1, tokens, heads, size]
        shape = torch.broadcast_shapes(weights.shape[:-2], value.shape[:-2])
        return attended.transpose(1, 2).reshape(*shape, *values.shape[-2:])


_step = threading.local()  # the mode of the step in each compute thread, which run the same modules


@contextmanager
def replacing(mode: StepProducts) -> Iterator[None]:
    """Replace the products of the modules of ``mark`` in the calling thread, inside the context."""
    _step.mode = mode
    try:
        with mode:
            yield
    finally:
        _step.mode = None


def mark(module: nn.Module) -> None:
    """Make the products of ``module`` those of its attention in each step."""
    module.register_forward_pre_hook(_enter)
    module.register_forward_hook(_leave)


def _enter(module: nn.Module, _: object) -> None:
    _step.mode.module = module


def _leave(*_: object) -> None:
    _step.mode.module = None


class KnownScores(TorchFunctionMode):
    """Runs a model without weights, and gives known scores to the code between the products of its attention.

    Tensors that depend on weights or tokens are on the device ``meta``. All others have values.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.calls: list[ProductCall] = []
        self.modules: list[nn.Module] = []  # the modules that run, the innermost last
        self._tokens = tokens
        self._others: set[nn.Module] = set()  # modules with products that are not those of attention
        self._query: torch.Tensor | None = None
        self._key = self._scores = self._sums = torch.empty(0)

    def __torch_function__(
        self, function: Any, types: Collection[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (operands := _operands(function, args, kwargs)) is not None:
            made = self._product(operands)
            if made is not None:
                return made
        tensors = list(tensors_in((args, kwargs)))
        meta = [each for each in tensors if each.is_meta]
        if not meta:
            args, kwargs = _replaced((args, kwargs), _is_meta_device, lambda _: _CPU)
            made = function(*args, **kwargs)
            if function in _SOFTMAX and args[0].shape[-2:] == (self._tokens, self._tokens):
                self._sums = args[0]
            return made
        if any(self._varies(each) for each in tensors if not each.is_meta):
            raise OwnCode("it numbers tokens itself, or computes with a mask outside of the scores")
        return function(*_on_meta(args), **_on_meta(kwargs))

    def finish(self) -> None:
        """Raise ``OwnCode`` if a module with attention has further products, or if there is no attention."""
        if not self.calls:
            raise OwnCode("it multiplies no queries and keys of all tokens")
        if any(call.module in self._others for call in self.calls):
            raise OwnCode("a module multiplies more matrices than queries, keys and values")

    def _varies(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has values that differ from token to token."""
        tokens = [dim for dim, size in enumerate(tensor.shape) if size == self._tokens]
        return any(bool((tensor != tensor.narrow(dim, 0, 1)).any()) for dim in tokens)

    def _product(self, operands: _Operands) -> torch.Tensor | None:
        first, second, tokens = operands.first, operands.second, self._tokens
        if first.is_meta and second.is_meta and first.shape[-2] == second.shape[-1] == tokens:
            if self._query is not None:
                raise OwnCode("a module multiplies more matrices than queries, keys and values")
            self._query, self._key = first, second.mT
            shape = (*torch.broadcast_shapes(first.shape[:-2], second.shape[:-2]), tokens, tokens)
            self._scores = scores_of(tokens).expand(shape)
            if operands.added is None:
                return self._scores.clone()
            if operands.added.is_meta:
                raise OwnCode("it adds values to its scores that depend on weights")
            return operands.beta * operands.added + operands.alpha * self._scores
        if second.is_meta and first.shape[-2:] == (tokens, tokens):
            if self._query is None or first.is_meta:
                raise OwnCode("it computes with its scores in another way than by a softmax")
            self.calls.append(self._call(first, second))
            shape = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
            made = torch.empty(*shape, *second.shape[-2:], dtype=second.dtype, device=META)
            self._query = None
            return made
        self._others.update(self.modules)
        return None

    def _call(self, weights: torch.Tensor, value: torch.Tensor) -> ProductCall:
        """Return the attention whose softmax gave ``weights``. Raises ``OwnCode``."""
        assert self._query is not None
        sums = self._sums.float()
        if sums.numel() != weights.numel() or not torch.allclose(
            weights.reshape(-1).float(), sums.softmax(-1).reshape(-1), atol=1e-5
        ):
            raise OwnCode("it computes with its scores in another way than by a softmax")
        scale, window, slopes = rules_of(sums.reshape(-1, self._tokens, self._tokens))
        return ProductCall(
            module=self.modules[-1],
            query=_heads_first(self._query).shape,
            key=_heads_first(self._key).shape,
            value=_heads_first(value).shape,
            scale=scale,
            window=window,
            slopes=tuple(slopes) if any(slopes) else None,
        )


def scores_of(tokens: int) -> torch.Tensor:
    """Return the known scores ``[tokens, tokens]``: zeros in even rows and on the diagonal, random in odd rows."""
    scores = torch.randn(tokens, tokens, generator=torch.Generator().manual_seed(0)) * 4
    scores[::2] = 0
    return scores.fill_diagonal_(0)


def rules_of(sums: torch.Tensor) -> tuple[float, int | None, list[float]]:
    """Return scale, window and slope of each head, from the input of the softmax, ``sums [heads, tokens, tokens]``.

    The scores were ``scores_of(tokens)``. Raises ``OwnCode`` if the input is not ``scale * score + slope * key`` for
    the token itself and the tokens before it that are in the window.
    """
    tokens = sums.shape[1]
    places = torch.arange(tokens)
    distance = places[:, None] - places  # from the key to the query
    seen = sums > _MASKED
    window = int(seen[0, -1].sum())
    if not torch.equal(seen, ((distance >= 0) & (distance < window)).expand_as(seen)):
        raise OwnCode("its attention is neither causal nor a sliding window of recent tokens")
    rises = (sums - sums.diagonal(dim1=1, dim2=2)[:, :, None]).masked_fill(~seen, 0)
    last = tokens - 1 if tokens % 2 else tokens - 2  # an even row, whose scores are zeros
    first = max(0, last - window + 1)
    slopes = -rises[:, last, first].double() / max(1, last - first)
    scores = scores_of(tokens).expand_as(rises).masked_fill(~seen, 0)
    rest = rises + (slopes[:, None, None] * distance).masked_fill(~seen, 0).float()
    scale = float((rest * scores).sum(dtype=torch.float64) / (scores * scores).sum(dtype=torch.float64))
    if scale <= 0 or float((rest - scale * scores).abs().max()) > _TOLERANCE:
        raise OwnCode("it adds a bias of its own to the scores, or changes them in another way")
    slopes[slopes.abs() < _TOLERANCE / tokens] = 0
    return scale, None if window == tokens else window, slopes.tolist()


def tokens_of(model: nn.Module, max_tokens: int, most: int = _MOST_TOKENS) -> int:
    """Return the number of tokens of a run, at most ``most``: a prime that is no size of a tensor of ``model``."""
    sizes = {size for each in (*model.parameters(), *model.buffers()) for size in each.shape}
    for tokens in range(min(most, max_tokens), 2, -1):
        if tokens not in sizes and all(tokens % divisor for divisor in range(2, int(tokens**0.5) + 1)):
            return tokens
    raise OwnCode(f"contexts of {max_tokens} tokens are too short to find what its attention computes")


@contextmanager
def named_modules_of(model: nn.Module, mode: KnownScores) -> Iterator[None]:
    """Keep ``mode.modules`` up to date while ``model`` runs."""
    with ExitStack() as hooks:
        for module in model.modules():
            entering = module.register_forward_pre_hook(lambda each, _: mode.modules.append(each))
            leaving = module.register_forward_hook(lambda *_: mode.modules.pop() and None)
            hooks.callback(entering.remove)
            hooks.callback(leaving.remove)
        yield


def hidden_window(module: nn.Module, tokens: int) -> bool:
    """Return whether a table of ``module`` masks tokens that a run with ``tokens`` tokens does not reach."""
    for table in module.buffers(recurse=False):
        if table.dim() >= 2 and table.shape[-1] == table.shape[-2] > tokens:
            seen = int((table.reshape(-1, *table.shape[-2:])[0, -1] != 0).sum())
            if tokens <= seen < table.shape[-1]:
                return True
    return False

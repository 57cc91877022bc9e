"""A transformers model over paged keys and values.

The tokens of all rows of a step go through the unmodified model as one sequence with explicit
positions. Where a layer attends, transformers calls `attend`, which writes the layer's keys and
values to the cache and reads those of each row's own context (`attention.interface`). So batches,
chunks of prompts, shared prefixes and forks work as in the builtin engine.

`probe.py` finds out which models allow that, and their layers' shapes, windows and scales.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from parrot_engine.attention.interface import AttentionBackend

#: The name of `attend` among transformers' attention functions. No mask function has this name, so
#: models make no masks.
PAGED = "parrot_paged"


class AttentionLayer(NamedTuple):
    """The attention of one layer, the same in every step."""

    num_heads: int
    num_kv_heads: int
    #: Elements of a query or key head.
    head_dim: int
    #: Elements of a value head, at most those of a key head.
    value_dim: int
    scale: float
    #: Keys visible to a token, including its own; None: all.
    window: int | None
    softcap: float | None


class Attends(Protocol):
    """Computes a layer's attention for `attend`."""

    def attend(
        self, module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor:
        """Return the weighted sums of values, `[tokens, heads, value_dim]`.

        `heads` are rotated queries, keys and values, `[1, heads, tokens, head_dim]`; `options` are
        the other arguments of the layer's call.
        """
        ...


#: NOTE: a context variable, because some models do not pass arguments of forward on to their
#: layers.
_attending: ContextVar[Attends] = ContextVar("attending")


@contextmanager
def attending(by: Attends) -> Iterator[None]:
    """Use `by` for attention in this thread's models within the context."""
    token = _attending.set(by)
    try:
        yield
    finally:
        _attending.reset(token)


#: The result of an attention function, and its weights, which are not used.
Attended: TypeAlias = tuple[Tensor, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Attended:
    """Attend as transformers expects of an attention function; returns `[1, tokens, heads,
    value_dim]`.
    """
    options["mask"] = attention_mask
    return _attending.get().attend(module, (query, key, value), options)[None], None


AttentionInterface.register(PAGED, attend)


class _Step(NamedTuple):
    """Attention over the cache in one step."""

    layers: Sequence[AttentionLayer]
    kv_layers: Sequence[Tensor]
    attention: AttentionBackend[Any]
    plan: Any

    def attend(
        self, module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor:
        """See `Attends`."""
        index = module.layer_idx
        assert isinstance(index, int)
        layer = self.layers[index]
        # Some models rotate in float32 and do not convert back.
        dtype = heads[2].dtype
        query, key, value = (part[0].transpose(0, 1).to(dtype).contiguous() for part in heads)
        missing = layer.head_dim - layer.value_dim
        if missing:
            value = F.pad(value, (0, missing))
        attended = self.attention.forward(
            query,
            key,
            value,
            self.kv_layers[index],
            self.plan,
            window=layer.window,
            scale=layer.scale,
            sinks=options.get("s_aux"),
        ).view(query.shape)
        return attended[..., : layer.value_dim] if missing else attended


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Implements `runner.paged_model.ModelShape`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    windows: tuple[int | None, ...]
    attention_softcap: float | None


class PackedModel:
    """Implements `runner.paged_model.PagedModel`."""

    def __init__(
        self,
        model: PreTrainedModel,
        body: str,
        shape: PackedShape,
        layers: Sequence[AttentionLayer],
    ) -> None:
        """Wrap a model whose attention function is `PAGED`.

        Args:
            model: in evaluation mode.
            body: path of its module that turns tokens into hidden states.
            shape: common to all layers.
            layers: in the order of `layer_idx`.
        """
        self.config = shape
        self._layers = layers
        self._body = model.get_submodule(body)
        self._head = _with_submodule(model, body.split("."), _GivenHidden(self._body))

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        attention: AttentionBackend[Any],
        plan: Any,
    ) -> Tensor:
        """Return hidden states `[num_tokens, hidden_size]` after the final norm."""
        step = _Step(self._layers, kv_cache.unbind(0), attention, plan)
        with attending(step):
            outputs = self._body(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            )
        hidden: Tensor = outputs[0][0]
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `[rows, vocab_size]` in float32, after all steps of the model's own head."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float() if out is None else out.copy_(logits)


class _GivenHidden(nn.Module):
    """Replaces a model's body and returns hidden states that the body has computed before."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.config = body.config

    def forward(self, *args: Any, inputs_embeds: Tensor, **options: Any) -> Any:
        """Return the outputs of a body; `inputs_embeds` are its hidden states."""
        del args, options
        return _Outputs(inputs_embeds)


class _Outputs:
    """The outputs of a body, with hidden states only."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _with_submodule(module: nn.Module, path: Sequence[str], replacement: nn.Module) -> nn.Module:
    """Return a module with the weights of `module` and another submodule at `path`."""
    if not path:
        return replacement
    copied = copy.copy(module)
    children = dict(module.named_children())
    children[path[0]] = _with_submodule(children[path[0]], path[1:], replacement)
    copied.__dict__["_modules"] = children
    return copied

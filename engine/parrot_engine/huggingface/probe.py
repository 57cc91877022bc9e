"""Finds out by one run if a transformers model works over paged keys and values.

A few tokens go through the model with an attention function and a mask function that only record
heads, scales, and the rule of each layer's mask. Features that the paged path does not implement
are refused by name (`UnpagedModelError`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from parrot_engine.huggingface.packed_model import AttentionLayer, PackedShape, attend, attending

_PROBED = "parrot_probed"
_NUM_TOKENS = 4

#: Options of an attention call that change nothing here, or that are known by other means.
_IGNORED = frozenset({
    "dropout", "is_causal", "mask", "position_ids", "s_aux", "scaling", "sliding_window", "softcap",
    "use_cache",
})  # fmt: skip

#: Rotary embeddings whose angles depend on the longest context of a batch.
_VARYING_ROPES = ("dynamic", "longrope")


class UnpagedModelError(Exception):
    """A model does not work over paged keys and values, with the reason."""


class Probed(NamedTuple):
    """The facts about a model that works."""

    #: Path of the module that turns tokens into hidden states.
    body: str
    shape: PackedShape
    layers: list[AttentionLayer]


def _keep_rule(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Any, **options: Any
) -> Tensor:
    """Make a mask that only carries its rule; called by transformers."""
    del options
    mask = torch.zeros(batch_size, 1, q_length, kv_length)
    mask.parrot_rule = mask_function
    return mask


AttentionInterface.register(_PROBED, attend)
AttentionMaskInterface.register(_PROBED, _keep_rule)


@torch.inference_mode()
def probe(model: PreTrainedModel, longest: int) -> Probed:
    """Record how `model` attends; `longest` is the longest context.

    Raises:
        UnpagedModelError: differently from paged attention.
    """
    config = model.config.get_text_config()
    _check_class(model)
    recorder = _Recorder(longest)
    token_ids = torch.arange(1, 1 + _NUM_TOKENS, device=model.device)[None]
    bodies = list[str]()
    with _attention(model, _PROBED), _outermost_body(model, bodies), attending(recorder):
        try:
            logits = model(
                input_ids=token_ids,
                position_ids=torch.arange(_NUM_TOKENS, device=model.device)[None],
                use_cache=False,
            ).logits
        except UnpagedModelError:
            raise
        except Exception as error:
            raise UnpagedModelError(f"a look at its attention fails: {error!r}") from error
    count = config.num_hidden_layers
    if sorted(recorder.layers) != list(range(count)):
        raise UnpagedModelError(
            f"of {count} layers {len(recorder.layers)} attend as transformers' interface has it"
        )
    layers = [recorder.layers[index] for index in range(count)]
    if len({layer._replace(window=None, scale=1.0) for layer in layers}) > 1:
        raise UnpagedModelError("its layers have heads of different shapes")
    first = layers[0]
    shape = PackedShape(
        architecture=type(model).__name__,
        vocab_size=logits.shape[-1],
        hidden_size=config.hidden_size,
        num_layers=count,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_position=longest,
        windows=tuple(layer.window for layer in layers),
        attention_softcap=first.softcap,
    )
    return Probed(bodies[0], shape, layers)


def _check_class(model: PreTrainedModel) -> None:
    if not model._supports_attention_backend:
        raise UnpagedModelError("its attention cannot be replaced")
    if model._is_stateful or model.config.is_encoder_decoder:
        raise UnpagedModelError("it keeps more than keys and values of its own tokens")
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in _VARYING_ROPES:
                raise UnpagedModelError(f"its rotary embedding ({kind}) depends on the length")


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    own = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


@contextmanager
def _outermost_body(model: PreTrainedModel, found: list[str]) -> Iterator[None]:
    """Add the paths of the models within `model` in the order in which they are called."""

    def note(path: str) -> Callable[..., None]:
        return lambda *_: found.append(path)

    hooks = [
        module.register_forward_pre_hook(note(path))
        for path, module in model.named_modules()
        if path and isinstance(module, PreTrainedModel)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Recorder:
    """Records the attention of each layer without computing it."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.layers: dict[int, AttentionLayer] = {}

    def attend(
        self, module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor:
        """See `packed_model.Attends`."""
        query, key, value = heads
        unknown = sorted(
            name
            for name, option in options.items()
            if name not in _IGNORED and option is not None and option is not False
        )
        if unknown:
            raise UnpagedModelError(f"its attention has {', '.join(unknown)}")
        index = module.layer_idx
        if not isinstance(index, int) or index in self.layers:
            raise UnpagedModelError("a layer attends more than once")
        sizes = {query.shape[2], key.shape[2], value.shape[2]}
        if sizes != {_NUM_TOKENS} or value.shape[-1] > key.shape[-1]:
            raise UnpagedModelError("its heads are not those of the tokens")
        rule = getattr(options["mask"], "parrot_rule", None)
        if rule is None:
            raise UnpagedModelError("its masks are its own")
        scale = options.get("scaling")
        self.layers[index] = AttentionLayer(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=window_of(rule, self._longest),
            softcap=options.get("softcap"),
        )
        return torch.zeros(
            query.shape[2], query.shape[1], value.shape[-1], dtype=value.dtype, device=value.device
        )


def window_of(rule: Callable[..., Tensor], longest: int) -> int | None:
    """Return the number of keys visible to each token, including its own; None: all.

    `rule` is a mask of transformers: for batch, head, query and key it is true if the query sees
    the key.

    Raises:
        UnpagedModelError: tokens see other keys than a fixed number of the last ones.
    """
    zero, keys = torch.zeros((), dtype=torch.int64), torch.arange(longest)

    def seen_by(query: int) -> Tensor:
        seen = rule(zero, zero, torch.tensor(query), keys)
        return torch.as_tensor(seen).expand(longest)

    try:
        count = int(seen_by(longest - 1).sum())
        for query in {longest - 1, longest - 2, longest * 2 // 3, longest // 3, count, 1, 0}:
            if not 0 <= query < longest:
                continue
            expected = (keys <= query) & (keys > query - count)
            if not torch.equal(seen_by(query), expected):
                raise UnpagedModelError("a token sees other keys than the last ones")
    except (IndexError, RuntimeError, TypeError) as error:
        raise UnpagedModelError(f"its masks cannot be read: {error!r}") from error
    return None if count == longest else count

"""A checkpoint's configuration, normalised and typed: the model, and defaults of sampling.

Reads `config.json` in the form of transformers 5 (`rope_parameters`, `layer_types`, `dtype`) and in
the older one (`rope_theta`, `rope_scaling`, `torch_dtype`, `use_sliding_window`), without
transformers. Unknown keys that would change the computation are refused by name
(`UnsupportedModelError`); keys that do not matter for inference are ignored, as in transformers.
`checkpoint.py` reads files and tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from parrot_engine.exceptions import CheckpointError, UnsupportedModelError
from parrot_engine.quantization.interface import Quantization
from parrot_engine.quantization.registry import read_quantization

RopeKind: TypeAlias = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")

#: Activation of the gated MLP by its name in `hidden_act`.
ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

#: Theta for configurations without one: the value that transformers 5 assumes for every family
#: here.
DEFAULT_ROPE_THETA = 10_000.0

#: Keys that transformers uses only if the checkpoint asks for sampling.
_SAMPLED_KEYS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary embedding; parameters of other kinds keep their defaults."""

    kind: RopeKind = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    #: Positions in pretraining, before any stretching.
    original_max_position: int = 0
    #: llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: yarn and longrope; None: derived from `factor`.
    attention_factor: float | None = None
    #: yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    #: longrope: divisors of the frequencies, one per rotated pair.
    short_factor: tuple[float, ...] = ()
    #: Number of rotated elements of a head, the first ones; None: all.
    rotary_dim: int | None = None
    #: True: neighbours are rotated together; False: elements half of `rotary_dim` apart.
    interleaved: bool = False


#: For layers whose heads are not rotated.
NO_ROPE = RopeConfig(rotary_dim=0)


class LayerNorms(NamedTuple):
    """Names of a layer's norms in a checkpoint; None for a missing one."""

    before_attention: str | None = "input_layernorm"
    #: Norm of attention's output before it is added to the stream.
    behind_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None


PRE_NORMS = LayerNorms()


class Fused(NamedTuple):
    """A product in the checkpoint that combines several of ours, stacked."""

    name: str
    #: Name and rows of each.
    parts: tuple[tuple[str, int], ...]


class ExpertNames(NamedTuple):
    """Names of a mixture of experts in a checkpoint: of the block, and of an expert's products."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


#: The names in most families.
EXPERT_NAMES = ExpertNames()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts that replaces the MLP of some layers."""

    count: int
    #: Experts per token.
    top_k: int
    #: Inner width of one expert.
    intermediate_size: int
    #: True: the factors of a token's experts add up to 1.
    normalize: bool
    layers: frozenset[int]
    names: ExpertNames = EXPERT_NAMES
    #: True: router, gate, up and down have biases.
    bias: bool = False
    #: Parameters of bounded experts; see `kernels.experts.grouped_tuning.ExpertWeights`.
    alpha: float = 1.0
    limit: float | None = None
    #: True: stored as in `stacked_experts`.
    stacked: bool = False
    #: The experts that this rank holds whole; None: all, or an equal part of each.
    local: range | None = None

    @property
    def held(self) -> range:
        """Return the indices of the experts with weights here."""
        return range(self.count) if self.local is None else self.local


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and options of one decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh"]
    #: Longest context in tokens that the positions allow.
    max_position: int
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    #: True: RMSNorm over each head of q and k before the rotation.
    qk_norm: bool
    #: Per layer, the number of keys visible to a token, itself included; None: all.
    windows: tuple[int | None, ...]
    #: The checkpoint's dtype as named in `config.json`, e.g. `bfloat16`.
    dtype: str | None
    #: Storage of the products' weights in the checkpoint; None: plain numbers.
    quantization: Quantization | None = None
    experts: ExpertsConfig | None = None
    #: True: RMSNorm over all heads of q together, and of k, before the rotation.
    projection_norm: bool = False
    norms: LayerNorms = PRE_NORMS
    #: Added to the weights of all norms.
    norm_offset: float = 0.0
    #: Rotary embedding per layer; empty: `rope` in all.
    layer_ropes: tuple[RopeConfig, ...] = ()
    #: Factor on attention scores; None: 1 / sqrt(head_dim).
    attention_scale: float | None = None
    #: Factors on the embedding, on a layer's contribution to the stream, and on the logits.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    #: True: each head has a score without a value beside those of the keys.
    sinks: bool = False
    #: Bounds of attention scores and of logits: bound x tanh(score / bound).
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    fused: tuple[Fused, ...] = ()
    #: True: the checkpoint contains more than a text model, whose tensors have a prefix.
    is_part: bool = False

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Return the distinct rotary embeddings of the layers."""
        return tuple(dict.fromkeys(self.layer_ropes or (self.rope,)))

    def rope_of(self, layer: int) -> int:
        """Return the index of a layer's rotary embedding in `ropes`."""
        return self.ropes.index(self.layer_ropes[layer]) if self.layer_ropes else 0


class GenerationDefaults(NamedTuple):
    """End-of-text ids and sampling defaults of a checkpoint."""

    #: Ids that end the text, in the order of the files.
    eos_token_ids: list[int]
    #: Keys of `SamplingParams`.
    sampling: dict[str, float]


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the single architecture in `config.json`.

    Raises `CheckpointError` if there are none or several.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"config.json: `architectures` must hold one name, found {names!r}")
    return names[0]


def read_common(
    raw: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] | None = None,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_max_position: int,
    default_partial_rotary: float | None = None,
) -> ModelConfig:
    """Read a family's configuration from the common keys and the family's options.

    `default_*` replace absent keys, as in the family's class in transformers; without
    `default_partial_rotary` the family rotates whole heads. Raises `CheckpointError` for missing or
    impossible values, and `UnsupportedModelError` for unknown features.
    """
    architecture = architecture_of(raw)
    hidden_size = _positive(raw, "hidden_size")
    num_layers = _positive(raw, "num_hidden_layers")
    num_heads = _positive(raw, "num_attention_heads")
    num_kv_heads = _optional(raw, "num_key_value_heads", default_kv_heads) or num_heads
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: {num_heads} attention heads are no multiple of {num_kv_heads} KV heads"
        )
    head_dim = _optional(raw, "head_dim", default_head_dim) or hidden_size // num_heads
    if head_dim % 2:
        raise UnsupportedModelError(f"odd head_dim {head_dim}", architecture=architecture)
    activation = raw.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {activation!r}", architecture=architecture)
    max_position = int(raw.get("max_position_embeddings") or default_max_position)
    rope = read_rope(raw, architecture, max_position, head_dim, default_partial_rotary)
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=ACTIVATIONS[activation],
        max_position=_usable_positions(rope, max_position),
        rope=rope,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        windows=windows if windows is not None else (None,) * num_layers,
        dtype=dtype if isinstance(dtype, str) else None,
        quantization=read_quantization(raw, architecture),
    )


def read_experts(
    raw: Mapping[str, Any],
    *,
    count: str,
    size: str,
    normalize: bool,
    dense_layers: Iterable[int] = (),
    names: ExpertNames = EXPERT_NAMES,
) -> ExpertsConfig:
    """Read the mixture of experts of all layers except the dense ones; `count` and `size` are keys.

    Raises like `read_common`.
    """
    num_experts, top_k = _positive(raw, count), _positive(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"config.json: {top_k} experts a token, of {num_experts} there are")
    activation = raw.get("hidden_act", "silu")
    if ACTIVATIONS.get(activation) != "silu":
        raise UnsupportedModelError(
            f"experts with activation {activation!r}", architecture=architecture_of(raw)
        )
    layers = frozenset(range(_positive(raw, "num_hidden_layers"))) - frozenset(dense_layers)
    return ExpertsConfig(num_experts, top_k, _positive(raw, size), normalize, layers, names)


def read_rope(
    raw: Mapping[str, Any],
    architecture: str,
    max_position: int,
    head_dim: int,
    default_partial: float | None = None,
) -> RopeConfig:
    """Read the rotary parameters from the new or the old keys.

    `default_partial` is the rotated share of a head if none is given; None forbids one.

    Priorities follow `RotaryEmbeddingConfigMixin.convert_rope_params_to_dict` and
    `standardize_rope_params` in transformers 5.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope parameters must be an object, found {given!r}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError("rope parameters per layer type", architecture=architecture)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {kind!r}", architecture=architecture)
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if default_partial is None and partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"partial rotary embedding (partial_rotary_factor={partial})", architecture=architecture
        )
    if partial is None:
        partial = 1.0 if default_partial is None else default_partial
    partial = positive_number({"partial_rotary_factor": partial}, "partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {partial} of {head_dim} elements are not pairs"
        )
    theta = given.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA
    # A value beside the rope parameters overrides the one in them, as in transformers.
    original = raw.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings", max_position
    )
    factor = given.get("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise CheckpointError(f"config.json: rope type {kind!r} needs a `factor`")
        factor = max_position / original
    short_factor = tuple(float(value) for value in given.get("short_factor") or ())
    if kind == "longrope" and len(short_factor) != rotary_dim // 2:
        raise CheckpointError(
            f"config.json: longrope needs {rotary_dim // 2} short factors, "
            f"found {len(short_factor)}"
        )
    attention_factor = given.get("attention_factor")
    return RopeConfig(
        kind=cast(RopeKind, kind),
        theta=float(theta),
        factor=float(factor),
        original_max_position=int(original),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        attention_factor=None if attention_factor is None else float(attention_factor),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
        short_factor=short_factor,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
    )


def windows_by_layer(
    raw: Mapping[str, Any], *, default_window: int | None
) -> tuple[int | None, ...]:
    """Return the windows of families with `use_sliding_window`, `max_window_layers` and
    `layer_types`.

    Without `layer_types`, layers from `max_window_layers` on have windows.
    """
    num_layers = _positive(raw, "num_hidden_layers")
    window = None
    if raw.get("use_sliding_window"):
        window = _optional(raw, "sliding_window", default_window)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(num_layers))
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json: {len(layer_types)} layer types for {num_layers} layers"
        )
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"layer type {unknown[0]!r}", architecture=architecture_of(raw))
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def read_generation_defaults(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None
) -> GenerationDefaults:
    """Read defaults from both files; the generation config wins, as in transformers' `generate`.

    Temperature, top-p, top-k and min-p apply only if `do_sample` is true: otherwise transformers
    decodes greedily and ignores them.
    """
    generation = generation_config or {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        eos_token_ids = []
    elif isinstance(eos, int):
        eos_token_ids = [eos]
    else:
        eos_token_ids = list(dict.fromkeys(int(token_id) for token_id in eos))
    keys = list(_SAMPLED_KEYS) if generation.get("do_sample") else []
    keys += ["repetition_penalty", "max_new_tokens"]
    sampling = {key: generation[key] for key in keys if generation.get(key) is not None}
    return GenerationDefaults(eos_token_ids, sampling)


def _usable_positions(rope: RopeConfig, max_position: int) -> int:
    """Return the number of positions whose rotation depends only on the position.

    NOTE: `dynamic` and `longrope` change all frequencies once a sequence exceeds a limit, which
    would invalidate cached keys (transformers keeps the stale ones). Both are fixed up to that
    limit, so contexts end there.
    """
    if rope.kind == "longrope":
        return min(max_position, rope.original_max_position)
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def window_of_all_layers(
    raw: Mapping[str, Any], *, default_window: int | None
) -> tuple[int | None, ...]:
    """Return the windows of families with one `sliding_window` for all layers; null means none."""
    window = _optional(raw, "sliding_window", default_window)
    layer_types = set(raw.get("layer_types") or ())
    if layer_types - {"full_attention" if window is None else "sliding_attention"}:
        raise UnsupportedModelError(
            "layer types other than what `sliding_window` says", architecture=architecture_of(raw)
        )
    return (window,) * _positive(raw, "num_hidden_layers")


def fused_qkv(config: ModelConfig) -> Fused:
    """Describe q, k and v as one product in the checkpoint."""
    query, key = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    return Fused("qkv_proj", (("q_proj", query), ("k_proj", key), ("v_proj", key)))


def fused_gate_up(config: ModelConfig) -> Fused:
    """Describe gate and up as one product in the checkpoint."""
    size = config.intermediate_size
    return Fused("gate_up_proj", (("gate_proj", size), ("up_proj", size)))


def positive_number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Read a number above 0; `default` if the key is absent.

    Raises `CheckpointError` for anything else.
    """
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: `{key}` must be a positive number, found {value!r}")
    return float(value)


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value = _optional(raw, key, None)
    if value is None:
        raise CheckpointError(f"config.json: `{key}` must be a positive integer, found none")
    return value


def _optional(raw: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """Read a positive integer or null; `default` if the key is absent."""
    value = raw.get(key, default)
    if value is not None and (not isinstance(value, int) or value <= 0):
        raise CheckpointError(f"config.json: `{key}` must be a positive integer, found {value!r}")
    return value

"""One model in equal parts for several devices (arXiv 1909.08053, section 3).

Heads and the inner width of the MLP, or of every expert, are divided: q, k, v, gate and up by
output; o and down by input, so their products are sums over the devices. Alternatively the experts
themselves are divided, whole ones for each device (`expert_parallel`): a device's own experts then
give a token its share of the sum. If there are fewer KV heads than devices, several devices hold
each. The output head is divided by token id; all devices hold embedding, norms and routers.

Depends only on shapes; a `Collective` moves values between devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from parrot_engine.exceptions import SettingsError
from parrot_engine.models.config import ModelConfig


class Shard(NamedTuple):
    """One of `size` parts."""

    rank: int = 0
    size: int = 1

    def share(self, total: int) -> int:
        """Return the entries of a part, exact for all but the last ones."""
        return -(-total // self.size)

    def rows(self, total: int) -> slice:
        """Return the part's entries of `total`."""
        share = self.share(total)
        return slice(min(self.rank * share, total), min((self.rank + 1) * share, total))


class Collective(Protocol):
    """Collective operations of one model's ranks; all ranks call the same ones in the same
    order.
    """

    shard: Shard

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, which may be overwritten."""
        ...

    def sums_onto(self, share: Tensor) -> bool:
        """Return true if `sum_onto` accepts `share`; all ranks agree."""
        ...

    def sum_onto(
        self, share: Tensor, hidden: Tensor, norm: tuple[Tensor, float] | None
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum) of `hidden` and all ranks' `share`, `[num_tokens,
        size]`.

        `norm` is (weight, eps) of an RMSNorm; without it, returns the sum twice.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return `[size, ...]`: all ranks' `x`, of equal shapes."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's `x` instead of one's own, of equal shape."""
        ...


def shard_config(
    config: ModelConfig, shard: Shard, *, expert_parallel: bool = False
) -> ModelConfig:
    """Return the shape of the layers that one rank holds; the vocabulary stays whole.

    With `expert_parallel` a rank holds whole experts, otherwise an equal part of each.

    Raises:
        SettingsError: the model cannot be divided into these parts.
    """
    size, experts = shard.size, config.experts
    if expert_parallel and experts is None:
        raise SettingsError("enable_expert_parallel", "the model has no mixtures of experts")
    if config.projection_norm:
        raise SettingsError("tensor_parallel", "norms over all heads of q and k are not divided")
    choices = _choices(config, expert_parallel=expert_parallel)
    for what, count in _divided(config, expert_parallel=expert_parallel):
        if count % size:
            raise SettingsError(
                "tensor_parallel", f"{count} {what} cannot be divided by {size}; {choices}"
            )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise SettingsError(
            "tensor_parallel",
            f"{config.num_kv_heads} KV heads cannot be divided by {size}; {choices}",
        )
    if experts is not None and expert_parallel:
        experts = replace(experts, local=range(experts.count)[shard.rows(experts.count)])
    elif experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        experts=experts,
    )


def _divided(config: ModelConfig, *, expert_parallel: bool) -> Iterator[tuple[str, int]]:
    """Yield each size that must be a multiple of the parts, with its name."""
    yield "attention heads", config.num_heads
    experts = config.experts
    if experts is None or len(experts.layers) < config.num_layers:
        yield "columns of the MLP", config.intermediate_size
    if experts is not None and expert_parallel:
        yield "experts", experts.count
    elif experts is not None:
        yield "columns of an expert", experts.intermediate_size


def _choices(config: ModelConfig, *, expert_parallel: bool) -> str:
    divided = list(_divided(config, expert_parallel=expert_parallel))

    def fits(size: int) -> bool:
        kv_heads = config.num_kv_heads
        return not any(count % size for _, count in divided) and not (
            kv_heads % size and size % kv_heads
        )

    sizes = [str(size) for size in range(1, config.num_heads + 1) if fits(size)]
    return f"this model can take {', '.join(sizes)}"


def part_of(whole: Sequence[int], part: Sequence[int], shard: Shard) -> tuple[slice, ...]:
    """Return the place of a rank's weight of shape `part` in the whole one of shape `whole`.

    Along each axis the parts follow each other by rank; if they are too many, several ranks hold
    the same one.
    """
    places = []
    for total, count in zip(whole, part, strict=True):
        rows = shard.rows(total)
        if count == total:
            rows = slice(0, total)
        elif rows.stop - rows.start != count:
            begin = shard.rank * (total // count) // shard.size * count
            rows = slice(begin, begin + count)
        places.append(rows)
    return tuple(places)

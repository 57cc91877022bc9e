"""A mixture of experts that replaces a layer's MLP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from parrot_engine.kernels.experts.grouped_tuning import ExpertWeights, PackedExperts
from parrot_engine.models.config import ExpertsConfig
from parrot_engine.models.lora import AdapterRows
from parrot_engine.models.ops import PLAIN, Affine, Branch, Experts, Norm, Ops, Residual
from parrot_engine.models.parts import Pack, Packable, TensorSpec, WeightPart
from parrot_engine.quantization.packed import above_each_other
from parrot_engine.quantization.weights import QuantizedWeight


class SparseMLP(Packable):
    """Sums, for each token, a few of many gated MLPs chosen by a router (arXiv 1701.06538).

    The experts' weights are stacked, so that few kernels compute their products.
    """

    def __init__(self, config: ExpertsConfig, hidden_size: int, spec: TensorSpec) -> None:
        super().__init__()
        self._config = config
        count, size = len(config.held), config.intermediate_size
        self.router = spec.empty(config.count, hidden_size)
        weight_spec = spec.of_products()
        self.gate_up = weight_spec.empty(count, 2 * size, hidden_size)
        self.down = weight_spec.empty(count, hidden_size, size)
        #: Both matrices as codes and scales; the plain ones then have no memory.
        self.packed: PackedExperts | None = None
        self.router_bias = spec.empty(config.count) if config.bias else None
        self.gate_up_bias = spec.empty(count, 2 * size) if config.bias else None
        self.down_bias = spec.empty(count, hidden_size) if config.bias else None

    def forward(
        self,
        residual: Residual,
        norm: Norm | None,
        branch: Branch,
        ops: Ops,
        adapters: AdapterRows | None = None,
    ) -> Residual:
        """Return the residual stream after the mixture, which reads its norm and has no
        adapters.
        """
        del adapters
        assert branch is PLAIN
        normed, hidden = ops.add_rms_norm(residual, norm)
        router = Affine(self.router, self.router_bias)
        return ops.experts_onto(hidden, normed, router, self._experts())

    def _experts(self) -> Experts:
        config = self._config
        weights = ExpertWeights(
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            config.alpha,
            config.limit,
            self.packed,
        )
        return Experts(weights, config.top_k, config.normalize, config.local)

    @property
    def is_meta(self) -> bool:
        return bool(self.gate_up.is_meta)

    def pack(self, weights: Sequence[Tensor | QuantizedWeight], pack: Pack) -> bool:
        count = len(self._config.held)
        pairs = zip(weights[::3], weights[1::3], strict=True)
        gate_up = above_each_other(map(pack, pairs), count)
        down = above_each_other((pack([weight]) for weight in weights[2::3]), count)
        if gate_up is None or down is None:
            return False
        self.packed = PackedExperts(gate_up, down)
        return True

    def give_memory(self, device: torch.device) -> None:
        self.gate_up = nn.Parameter(torch.empty_like(self.gate_up, device=device), False)
        self.down = nn.Parameter(torch.empty_like(self.down, device=device), False)

    def weight_parts(self, prefix: str) -> Iterator[WeightPart]:
        """Yield the parts; the block's name replaces the last component of `prefix`."""
        names, size = self._config.names, self._config.intermediate_size
        block = f"{prefix.rpartition('.')[0]}.{names.block}"
        yield WeightPart(f"{block}.{names.router}.weight", self.router)
        if self.router_bias is not None:
            yield WeightPart(f"{block}.{names.router}.bias", self.router_bias)
        for index, number in enumerate(self._config.held):
            expert = f"{block}.experts.{number}"
            for ending, gate_up, down in (
                ("weight", self.gate_up, self.down),
                ("bias", self.gate_up_bias, self.down_bias),
            ):
                if gate_up is not None and down is not None:
                    yield WeightPart(f"{expert}.{names.gate}.{ending}", gate_up[index][:size])
                    yield WeightPart(f"{expert}.{names.up}.{ending}", gate_up[index][size:])
                    yield WeightPart(f"{expert}.{names.down}.{ending}", down[index])

"""A mixture of experts in place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Iterator

from parrot_engine.models.config import ExpertsConfig
from parrot_engine.models.ops import PLAIN, Affine, Branch, Experts, Norm, Ops, Residual
from parrot_engine.models.parts import Stacked, TensorSpec, WeightPart


class SparseMLP(Stacked):
    """For each token the sum of a few of many gated MLPs, chosen by a router (arXiv 1701.06538).

    The experts' weights are stacked, so that their products are those of few kernels.
    """

    def __init__(self, config: ExpertsConfig, hidden_size: int, spec: TensorSpec) -> None:
        super().__init__()
        self._names = config.names
        self._top_k, self._normalize = config.top_k, config.normalize
        self.router = spec.empty(config.count, hidden_size)
        self.gate_up = spec.empty(config.count, 2 * config.intermediate_size, hidden_size)
        self.down = spec.empty(config.count, hidden_size, config.intermediate_size)

    def forward(self, residual: Residual, norm: Norm | None, branch: Branch, ops: Ops) -> Residual:
        """The residual stream behind the mixture, which reads its norm."""
        assert branch is PLAIN
        normed, hidden = ops.add_rms_norm(residual, norm)
        return ops.experts_onto(hidden, normed, Affine(self.router), self.experts)

    @property
    def experts(self) -> Experts:
        return Experts(self.gate_up, self.down, self._top_k, normalize=self._normalize)

    def weight_parts(self, prefix: str) -> Iterator[WeightPart]:
        """The name of the block replaces the last component of `prefix`."""
        block, gate, up, down = self._names
        path = f"{prefix.rpartition('.')[0]}.{block}"
        yield WeightPart(f"{path}.gate.weight", self.router)
        size = self.down.shape[2]
        for index, (gate_up, out) in enumerate(zip(self.gate_up, self.down, strict=True)):
            expert = f"{path}.experts.{index}"
            yield WeightPart(f"{expert}.{gate}.weight", gate_up[:size])
            yield WeightPart(f"{expert}.{up}.weight", gate_up[size:])
            yield WeightPart(f"{expert}.{down}.weight", out)

"""Predictions of output lengths, learned from earlier calls of the same template."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

#: Bins per doubling: a quantile is accurate to a factor of 2 ** (1 / 4).
_PER_OCTAVE = 4
#: The last bin holds outputs of 2 ** 24 tokens.
MAX_BIN = 24 * _PER_OCTAVE
#: All weights are halved when their sum exceeds this, so that old samples fade.
_MAX_WEIGHT = 256.0
#: Samples needed before a template's own histogram is used, and before the histogram of all calls
#: is.
_ENOUGH = 8
_ENOUGH_ALL = 32
_RATIO_BINS = 20


class FadingHistogram:
    """A histogram with bins of equal ratio and fading old samples.

    Args:
        bins: samples by bin, as `bins` gives them.

    Attributes:
        weight: samples, faded ones weigh less.
    """

    __slots__ = ("_bins", "_edge", "_share", "weight")

    def __init__(self, bins: Mapping[int, float] | None = None) -> None:
        self._bins: dict[int, float] = dict(bins or {})
        self.weight = sum(self._bins.values())
        # The quantile requested last since the last sample, and its share; -1 if there is none.
        self._share = -1.0
        self._edge = 0.0

    @property
    def bins(self) -> Mapping[int, float]:
        """Return the samples by bin number, from 0 to `MAX_BIN`."""
        return self._bins

    def add(self, value: float) -> None:
        """Add one sample, at least 0."""
        index = 0 if value < 1 else 1 + min(int(math.log2(value) * _PER_OCTAVE), MAX_BIN - 1)
        self._bins[index] = self._bins.get(index, 0.0) + 1.0
        self.weight += 1.0
        self._share = -1.0
        if self.weight > _MAX_WEIGHT:
            faded = {at: count / 2 for at, count in self._bins.items() if count >= 0.5}
            self._bins = faded
            self.weight = sum(faded.values())

    def quantile(self, share: float) -> float:
        """Return a value that `share` of the samples do not exceed: the upper edge of its bin."""
        if share == self._share:
            return self._edge
        wanted, seen, edge = share * self.weight, 0.0, 0.0
        for index in sorted(self._bins):
            edge = 2.0 ** (index / _PER_OCTAVE) if index else 0.0
            seen += self._bins[index]
            if seen >= wanted:
                break
        self._share, self._edge = share, edge
        return edge


class LengthPredictor:
    """Output lengths per sequence by template, and of all calls as a share of `max_tokens`.

    The least recently used templates are forgotten first.
    """

    def __init__(self, max_templates: int) -> None:
        self._max_templates = max_templates
        self._templates: OrderedDict[tuple[str, str], FadingHistogram] = OrderedDict()
        self._ratios = [0.0] * _RATIO_BINS
        self._ratio_weight = 0.0

    def __len__(self) -> int:
        return len(self._templates)

    def observe(self, tenant: str, template: str, generated: float, max_tokens: int) -> None:
        """Learn from a successful call that generated `generated` tokens per sequence."""
        if max_tokens <= 0:
            return
        index = min(int(_RATIO_BINS * generated / max_tokens), _RATIO_BINS - 1)
        self._ratios[index] += 1.0
        self._ratio_weight += 1.0
        if self._ratio_weight > _MAX_WEIGHT:
            self._ratios = [count / 2 for count in self._ratios]
            self._ratio_weight /= 2
        if not template:
            return
        key = (tenant, template)
        histogram = self._templates.get(key)
        if histogram is None:
            histogram = self._templates[key] = FadingHistogram()
            if len(self._templates) > self._max_templates:
                self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        histogram.add(generated)

    def predict(self, tenant: str, template: str, max_tokens: int, share: float = 0.9) -> int:
        """Return a length per sequence that `share` of such calls do not exceed; at most
        `max_tokens`.

        Uses the template's calls if enough have ended, else the share of `max_tokens` that all
        calls use, else `max_tokens`.
        """
        if max_tokens <= 0:
            return 0
        histogram = self._templates.get((tenant, template)) if template else None
        if histogram is not None and histogram.weight >= _ENOUGH:
            return max(1, min(max_tokens, math.ceil(histogram.quantile(share))))
        if self._ratio_weight >= _ENOUGH_ALL:
            wanted, seen = share * self._ratio_weight, 0.0
            for index, count in enumerate(self._ratios):
                seen += count
                if seen >= wanted:
                    return max(1, math.ceil(max_tokens * (index + 1) / _RATIO_BINS))
        return max_tokens

"""Predictions of output lengths, learned from what calls of the same template generated."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

#: Bins of a histogram for each doubling: a quantile is right within a factor of 2 ** (1 / 4).
_PER_OCTAVE = 4
#: Outputs up to 2 ** 24 tokens.
MAX_BIN = 24 * _PER_OCTAVE
#: Past this weight of samples all are halved, so that old ones fade.
_MAX_WEIGHT = 256.0
#: Samples before a template's own histogram is used, and before the one of all calls is.
_ENOUGH = 8
_ENOUGH_ALL = 32
_RATIO_BINS = 20


class FadingHistogram:
    """A histogram with bins of equal ratio, whose old samples fade.

    Args:
        bins: samples by bin, as `bins` gives them.

    Attributes:
        weight: samples, faded ones counted less.
    """

    __slots__ = ("_bins", "_edge", "_share", "weight")

    def __init__(self, bins: Mapping[int, float] | None = None) -> None:
        self._bins: dict[int, float] = dict(bins or {})
        self.weight = sum(self._bins.values())
        # The last quantile that was asked for since the last sample, and its share; -1: none.
        self._share = -1.0
        self._edge = 0.0

    @property
    def bins(self) -> Mapping[int, float]:
        """Samples by bin, whose numbers are from 0 to `MAX_BIN`."""
        return self._bins

    def add(self, value: float) -> None:
        """One sample, at least 0."""
        index = 0 if value < 1 else 1 + min(int(math.log2(value) * _PER_OCTAVE), MAX_BIN - 1)
        self._bins[index] = self._bins.get(index, 0.0) + 1.0
        self.weight += 1.0
        self._share = -1.0
        if self.weight > _MAX_WEIGHT:
            faded = {at: count / 2 for at, count in self._bins.items() if count >= 0.5}
            self._bins = faded
            self.weight = sum(faded.values())

    def quantile(self, share: float) -> float:
        """A value that is not exceeded by `share` of the samples: the upper edge of its bin."""
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
    """Output lengths per sequence by template, and over all as a share of `max_tokens`.

    Templates are forgotten least recently used first.
    """

    def __init__(self, max_templates: int) -> None:
        self._max_templates = max_templates
        self._templates: OrderedDict[tuple[str, str], FadingHistogram] = OrderedDict()
        self._ratios = [0.0] * _RATIO_BINS
        self._ratio_weight = 0.0

    def __len__(self) -> int:
        return len(self._templates)

    def observe(self, tenant: str, template: str, generated: float, max_tokens: int) -> None:
        """A call ended well after `generated` tokens a sequence."""
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
        """Tokens a sequence that `share` of such calls do not exceed; at most `max_tokens`.

        By the template where enough of its calls have ended, else by what share of its
        `max_tokens` any call uses, else `max_tokens`.
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

"""Scripted engines whose draft tokens are mostly right, or as a test says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from parrot_engine.engine.batcher import Batcher
from parrot_engine.engine.contexts import Context
from parrot_engine.engine.ngrams import NgramProposer
from parrot_engine.engine.speculation import Speculation
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner.sampler import sample
from parrot_engine.settings import BuiltinSettings

from harness.engine.doubles import (
    VOCAB_SIZE,
    ScriptedRunner,
    Trace,
    reference_generate,
    reference_logits,
    scripted_engine,
)

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


# Draft tokens that come out in all ways


class OracleSpeculation(Speculation):
    """Draft tokens what will come, with a share of errors."""

    def __init__(self, values: BuiltinSettings) -> None:
        super().__init__(values)
        self.source = random.Random(1)
        self.share_right = 0.8

    def propose(self, context: Context, proposer: NgramProposer, count: int) -> list[int]:
        generate = context.speculative_generate
        assert generate is not None
        assert generate.row is not None
        tokens = list(context.token_ids)
        row = replace(
            generate.row, generated_token_ids=list(generate.row.generated_token_ids), num_pending=0
        )
        drafts: list[int] = []
        while len(drafts) < count:
            token = sample(reference_logits(tokens), [row])[0].token_id
            if token is None or self.source.random() > self.share_right:
                token = self.source.randrange(VOCAB_SIZE)
            drafts.append(token)
            tokens.append(token)
            row.generated_token_ids.append(token)
        return drafts


class OracleBatcher(Batcher):
    """With these draft tokens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.speculation = OracleSpeculation(arguments[2])


def drafting(**options: Any) -> tuple[Trace, ScriptedRunner]:
    """An engine whose draft tokens are mostly right."""
    engine, runner = scripted_engine(
        **{"batcher": OracleBatcher, "speculative_tokens": 4, "overlap": "on", **options}
    )
    return Trace(engine), runner


def expected(tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return reference_generate(tokens, params)[0]

"""Speculative decoding: draft tokens are computed with the last known token and verified.

A generation whose text repeats something gets a row of more than one token: the last known token
and draft tokens for those that follow (`parrot_engine.engine.ngrams`). A token is sampled behind
each. The first is what would have been sampled without drafts; the next one is, too, if the first
draft was that very token, and so on up to the first draft that was wrong. So the outcome is that of
as many rows of a single token, and is applied as such (`parts_of`). What was computed for wrong
drafts is overwritten by what comes next; blocks are known by their tokens only up to where tokens
are certain.

Samplers draw by position, so this holds for drawn tokens as well as for greedy ones. Generations
whose draws look at the tokens before them (penalties, grammars) get no drafts.

What comes next depends on how many drafts were right, so nothing is planned behind a step with
drafts before its outcome is known. The device then waits for the host, which costs everybody in the
step some of its time. Drafts are proposed only

- in steps of few tokens, for most of which the device reads weights: a draft takes little longer;
- as many for a generation as its drafts, by how they came out lately, are worth their time;
- when all of them together are expected to make up for it, and for the wait;
- for generations whose drafts are not mostly wrong: these pause, longer each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from parrot_engine.batch import RowOutcome, SampledToken
from parrot_engine.engine.contexts import Context, PendingGenerate, PlannedRow
from parrot_engine.engine.ngrams import NgramProposer
from parrot_engine.settings import BuiltinSettings

#: The share of a step by which waiting for it delays the next one, and what each row adds to it.
_WAIT: Final = 0.2
_WAIT_BY_ROW: Final = 1 / 512
#: A step takes as long as reading the weights and computing its tokens; the former takes as long
#: as computing this many (engine-log, 31).
_WEIGHTS_IN_TOKENS: Final = 137
#: Tokens of prompts that are indexed between two steps: some 2 ms.
_INDEXED_PER_STEP: Final = 8192


class Speculation:
    """Chooses the draft tokens of a step, and keeps count of them."""

    def __init__(self, settings: BuiltinSettings) -> None:
        """With `settings.speculative_tokens` of at least 1."""
        self._max_drafts = settings.speculative_tokens
        self._min_length = settings.speculative_min_ngram
        self._max_length = settings.speculative_max_ngram
        self._max_step_tokens = settings.speculative_batch_tokens
        #: Draft tokens so far, and how many of them became tokens.
        self.proposed_tokens = 0
        self.accepted_tokens = 0

    def choose(self, running: Iterable[Context]) -> dict[Context, list[int]]:
        """The draft tokens of a step over these contexts, given in the order of their rank.

        For a context with a row in flight: those behind the token that the row samples.
        """
        contexts = list(running)
        num_rows = len(contexts)
        wait = _WAIT + _WAIT_BY_ROW * num_rows
        # What a draft takes, in tokens of a step without any.
        cost = (1 + wait) * num_rows / (_WEIGHTS_IN_TOKENS + num_rows)
        room = self._max_step_tokens - num_rows
        to_index = _INDEXED_PER_STEP
        chosen: dict[Context, list[int]] = {}
        expected = 0.0
        for context in contexts:
            if room <= 0:
                break
            generate = context.speculative_generate
            if generate is None or generate.row is None:
                continue
            proposer = generate.proposer
            if proposer is None:
                proposer = generate.proposer = NgramProposer(self._min_length, self._max_length)
            generated = len(generate.row.generated_token_ids)
            if generated < proposer.resumes_at:
                continue
            to_index -= proposer.index.extend(context.token_ids, to_index)
            num_pending = 0 if context.in_flight is None else 1
            limit = min(
                proposer.worth(cost),
                self._max_drafts,
                room,
                # The last token is sampled, not drafted.
                generate.row.params.max_tokens - generated - num_pending - 1,
                context.max_tokens - len(context.token_ids) - num_pending - 1,
            )
            if limit <= 0 or proposer.index.num_tokens < len(context.token_ids):
                continue
            drafts = self.propose(context, proposer, num_pending + limit)[num_pending:]
            if drafts:
                chosen[context] = drafts
                room -= len(drafts)
                expected += proposer.expected(len(drafts))
        num_drafts = sum(map(len, chosen.values()))
        return chosen if expected >= wait * num_rows + cost * num_drafts else {}

    def propose(self, context: Context, proposer: NgramProposer, count: int) -> list[int]:
        """Up to `count` tokens that may follow those which the context has."""
        return proposer.index.propose(context.token_ids, count)

    def note(self, generate: PendingGenerate, num_drafts: int, num_right: int) -> None:
        """Record that `num_right` of a row's `num_drafts` draft tokens became tokens."""
        self.proposed_tokens += num_drafts
        self.accepted_tokens += num_right
        row, proposer = generate.row, generate.proposer
        if row is not None and proposer is not None:
            proposer.note(num_right, num_drafts, len(row.generated_token_ids) + num_right + 1)


def parts_of(planned: PlannedRow, outcome: RowOutcome) -> list[tuple[PlannedRow, RowOutcome]]:
    """A row with drafts as the rows of one token that it stands for, as far as they were right.

    One for each token that the generation gets: up to the first that is not what was drafted, or
    that ends the text, or behind scores that are not finite.
    """
    generate = planned.generate
    assert generate is not None
    assert generate.row is not None
    assert outcome.token is not None
    drafts: list[int | None] = [*planned.drafts, None]
    tokens: list[SampledToken] = [outcome.token, *outcome.following]
    parts = []
    for offset, (token, draft) in enumerate(zip(tokens, drafts, strict=True)):
        start = planned.start + offset
        part = PlannedRow(
            planned.context, generate, None, start, start + 1, planned.number, planned.epoch
        )
        parts.append((part, RowOutcome(token)))
        if token.token_id != draft or token.token_id in generate.row.end_token_ids:
            break
    return parts

"""The prefix index against a plain model: which row holds which keys, one set each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from parrot_scheduler.engines.table import rows_of
from parrot_scheduler.prefix_index.index import PrefixClaim, PrefixIndex, chain_of
from parrot_scheduler.task import Task

ROWS = 12
ROW = st.integers(0, ROWS - 1)
# Chains as in a tree of prompts: a key stands for the whole path to it.
PATH = st.lists(st.integers(0, 2), min_size=1, max_size=6)
CHAIN = PATH.map(lambda path: [hash(tuple(path[: i + 1])) for i in range(len(path))])


def holders(index: PrefixIndex, chain: Sequence[Any]) -> dict[int, int]:
    """By row, how many leading blocks it holds or is about to hold."""
    rows = rows_of(index.rows_with(chain))
    return {row: depth for row in rows if (depth := index.blocks_on(row, chain))}


def needed_blocks(index: PrefixIndex, chain: Sequence[Any]) -> dict[int, int]:
    """By row, how many leading blocks its placed tasks need."""
    rows = rows_of(index.rows_with(chain))
    return {row: depth for row in rows if (depth := index.claimed_on(row, chain))}


def check_deepest(index: PrefixIndex, chain: Sequence[Any], rows: int) -> None:
    """The index tells which rows of a set hold most of a chain, and how much."""
    here = {row: n for row, n in holders(index, chain).items() if rows >> row & 1}
    most = max(here.values(), default=0)
    depth, found = index.deepest(rows, chain)
    assert (depth, list(rows_of(found))) == (most, [row for row in here if here[row] == most])


def leading(chain: list[int], held: set[int]) -> int:
    for depth, key in enumerate(chain):
        if key not in held:
            return depth
    return len(chain)


class AgainstSets(RuleBasedStateMachine):
    """Any order of news, for rows that come, go and are reused."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[int, set[int]] = {row: set() for row in range(ROWS)}
        #: By key, itself and all that were stored behind it.
        self.behind: dict[int, set[int]] = {}
        self.claims: list[tuple[PrefixClaim, list[int], int]] = []
        self.generation = dict.fromkeys(range(ROWS), 0)
        #: By row, the blocks that claims took, as the index says, without those that it gave back.
        self.needed = dict.fromkeys(range(ROWS), 0)

    def claimed(self, row: int) -> set[int]:
        return {
            key
            for claim, chain, generation in self.claims
            if claim.row == row and generation == self.generation[row]
            for key in chain
        }

    @rule(row=ROW, chain=CHAIN)
    def stored(self, row: int, chain: list[int]) -> None:
        """Only what is new of a chain is told."""
        start = leading(chain, self.held[row])
        for depth, key in enumerate(chain):
            self.behind.setdefault(key, set()).update(chain[depth:])
        self.index.stored(row, chain[start:])
        self.held[row] |= set(chain[start:])

    @rule(rows=st.sets(ROW, min_size=9), chain=CHAIN)
    def stored_by_many(self, rows: set[int], chain: list[int]) -> None:
        for row in rows:
            self.stored(row, chain)

    @rule(row=ROW, chain=CHAIN, start=st.integers(0, 5))
    def evicted(self, row: int, chain: list[int], start: int) -> None:
        """A block goes once those that continue it have gone."""
        for key in chain[start : start + 1]:
            gone = self.behind.get(key, {key})
            self.index.evicted(row, gone)
            self.held[row] -= gone

    @rule(row=ROW)
    def all_evicted(self, row: int) -> None:
        self.index.evicted(row, None)
        self.held[row] = set()

    @rule(row=ROW)
    def left(self, row: int) -> None:
        self.index.drop_row(row)
        self.held[row] = set()
        self.generation[row] += 1
        self.needed[row] = 0

    @rule(row=st.integers(0, 2), chain=CHAIN)
    def claim(self, row: int, chain: list[int]) -> None:
        shared = leading(chain, self.claimed(row))
        claim = self.index.claim(row, chain)
        assert claim.shared_blocks == shared
        self.needed[row] += len(chain) - claim.shared_blocks
        self.claims.append((claim, chain, self.generation[row]))

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        if not self.claims:
            return
        which = data.draw(st.integers(0, len(self.claims) - 1))
        claim = self.claims[which][0]
        before = self.claimed(claim.row)
        del self.claims[which]
        freed = self.index.release(claim)
        assert freed == len(before - self.claimed(claim.row))
        self.needed[claim.row] -= freed

    @rule(chain=CHAIN, rows=st.integers(0, 2**ROWS - 1))
    def match(self, chain: list[int], rows: int) -> None:
        there = {row: leading(chain, self.held[row] | self.claimed(row)) for row in range(ROWS)}
        assert holders(self.index, chain) == {r: n for r, n in there.items() if n}
        needed = {row: leading(chain, self.claimed(row)) for row in range(ROWS)}
        assert needed_blocks(self.index, chain) == {r: n for r, n in needed.items() if n}
        check_deepest(self.index, chain, rows)
        for row in range(ROWS):
            assert self.index.stored_on(row, chain) == leading(chain, self.held[row])

    @invariant()
    def nothing_is_left_over(self) -> None:
        assert len(self.index) == len(set().union(*self.held.values()))
        for row in range(ROWS):
            assert self.needed[row] == len(self.claimed(row))


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@settings(max_examples=200, deadline=None)
@given(
    held=st.lists(st.integers(0, 8), max_size=40),
    claimed=st.dictionaries(ROW, st.integers(1, 8), max_size=4),
    rows=st.integers(-1, 2**40),
)
def test_a_match_is_the_leading_run_of_every_row(
    held: list[int], claimed: dict[int, int], rows: int
) -> None:
    index = PrefixIndex()
    prompt = list(range(8))
    for row, blocks in enumerate(held):
        index.stored(row, prompt[:blocks])
    for row, blocks in claimed.items():
        index.claim(row, prompt[:blocks])
    there = dict(enumerate(held))
    for row, blocks in claimed.items():
        there[row] = max(there.get(row, 0), blocks)
    assert holders(index, prompt) == {row: blocks for row, blocks in there.items() if blocks}
    assert needed_blocks(index, prompt) == claimed
    assert index.most_claimed(prompt) == max(claimed.values(), default=0)
    check_deepest(index, prompt, rows)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.one_of(CHAIN.map(lambda chain: ("claim", chain)), st.integers(0, 9)), max_size=30
    )
)
def test_blocks_taken_and_given_back_are_those_of_the_claims_that_are_left(
    steps: list[tuple[str, list[int]] | int],
) -> None:
    index = PrefixIndex()
    claims: list[PrefixClaim] = []
    needed = 0
    for step in steps:
        before = {key for claim in claims for key in claim.keys}
        if not isinstance(step, int):
            claim = index.claim(0, step[1])
            assert claim.shared_blocks == leading(step[1], before)
            claims.append(claim)
            needed += len(step[1]) - claim.shared_blocks
        elif claims:
            freed = index.release(claims.pop(step % len(claims)))
            assert freed == len(before - {key for claim in claims for key in claim.keys})
            needed -= freed
        assert needed == len({key for claim in claims for key in claim.keys})


def test_engines_that_need_more_of_other_prompts_need_as_much_of_this_one() -> None:
    index = PrefixIndex()
    index.claim(0, [1, 2, 3, 4])
    index.claim(1, [1, 2, 3])
    index.claim(2, [1])
    assert index.deepest(-1, [1, 2, 9]) == (2, 0b11)


def test_keys_that_are_no_chain_do_no_harm() -> None:
    """Twice in one prompt, or behind different beginnings: nonsense, and forgotten as well."""
    index = PrefixIndex()
    index.stored(0, [1, 2, 1, 2])
    claims = [index.claim(0, keys) for keys in ([1, 2, 1], [3, 2], [2, 2], [])]
    index.deepest(-1, [2, 3, 1, 2])
    taken = sum(len(claim.keys) - claim.shared_blocks for claim in claims)
    assert sum(map(index.release, claims)) == taken
    index.evicted(0, [2, 2, 1])
    assert len(index) == 0


def test_news_of_rows_that_are_not_there_change_nothing() -> None:
    index = PrefixIndex()
    index.stored(-1, [1, 2])
    index.evicted(-1, [1])
    index.evicted(-1, None)
    index.drop_row(-1)
    index.assume(-1, [1], 10)
    assert len(index) == 0


def test_a_release_after_the_engine_left_does_not_touch_its_successor() -> None:
    index = PrefixIndex()
    old = index.claim(3, [1, 2])
    index.drop_row(3)
    index.claim(3, [1, 2])
    assert index.release(old) == 0
    assert holders(index, [1, 2, 3]) == {3: 2}


def test_the_bound_forgets_ends_of_old_chains_first() -> None:
    index = PrefixIndex(max_blocks=5)
    index.stored(0, [1, 2, 3])
    index.stored(1, [11, 12, 13])
    assert len(index) == 5
    assert holders(index, [1, 2, 3]) == {0: 2}
    index.release(index.claim(0, [1, 2]))  # used again: younger than row 1's
    index.stored(2, [21, 22])
    assert len(index) == 5
    assert holders(index, [1, 2]) == {0: 2}
    assert holders(index, [11, 12, 13]) == {1: 1}


def test_a_claimed_chain_is_young_again_and_forgotten_from_its_end_too() -> None:
    index = PrefixIndex(max_blocks=64)
    first, second = [list(range(start, start + 30)) for start in (0, 100)]
    index.stored(0, first)
    index.stored(0, second)
    index.release(index.claim(0, first))
    index.stored(0, list(range(200, 220)))
    assert index.blocks_on(0, first) == 30
    assert index.blocks_on(0, second) < 30
    index.stored(0, list(range(300, 325)))
    assert 0 < index.blocks_on(0, first) < 30


def test_a_silent_engine_is_assumed_to_hold_what_was_placed_last() -> None:
    index = PrefixIndex()
    index.assume(0, [1, 2, 3], capacity=4)
    index.assume(0, [1, 12, 13], capacity=4)
    assert holders(index, [1, 12, 13]) == {0: 3}
    assert holders(index, [1, 2, 3]) == {0: 2}
    assert len(index) == 4
    index.drop_row(0)
    assert len(index) == 0


def test_assumptions_have_a_bound_over_all_engines() -> None:
    index = PrefixIndex(max_blocks=10)
    for row in range(8):
        index.assume(row, [100 * row + i for i in range(4)], capacity=100)
        index.assume(row, [1, 2], capacity=100)
    keys = {1, 2} | {100 * row + i for row in range(8) for i in range(4)}
    assert sum(len(holders(index, [key])) for key in keys) <= 10
    assert len(index) <= 10


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_blocks"):
        PrefixIndex(max_blocks=0)


def test_what_cannot_be_seen_is_followed_by_template_and_application() -> None:
    task = Task(1, "m", "t", "app", 100, 10, prefix=(5, 6), template="greeting")
    other = Task(2, "m", "t", "app-2", 100, 10, prefix=(7,), template="greeting")
    assert chain_of(task, 16) == (5, 6)
    index = PrefixIndex()
    index.assume(0, chain_of(task, 0), capacity=10)
    assert holders(index, chain_of(task, 0)) == {0: 2}
    assert holders(index, chain_of(other, 0)) == {0: 1}


class Counting(int):
    """A key that counts how often it is looked at."""

    looks = 0

    def __hash__(self) -> int:
        Counting.looks += 1
        return int.__hash__(self)


@pytest.mark.parametrize("engines", [1, 100, 1000])
def test_a_look_up_looks_at_few_blocks_however_many_engines_hold_them(engines: int) -> None:
    index = PrefixIndex()
    for row in range(engines):
        index.stored(row, list(range(500)))
        index.stored(row, [1000 + row])
    chain = [Counting(i) for i in range(500)]
    Counting.looks = 0
    assert index.deepest(-1, chain) == (500, 2**engines - 1)
    assert index.blocks_on(0, chain) == 500
    assert Counting.looks <= 30


def test_a_claim_does_not_look_at_every_block() -> None:
    """Neither where its prompt parts from others, nor where it goes on alone."""
    index = PrefixIndex()
    Counting.looks = 0
    claims = [
        index.claim(
            row, [Counting(block if block < 500 else 1000 * row + block) for block in range(900)]
        )
        for row in range(1, 11)
    ]
    index.most_claimed([Counting(block) for block in range(900)])
    assert needed_blocks(index, list(range(900))) == dict.fromkeys(range(1, 11), 500)
    for claim in claims:
        index.release(claim)
    assert Counting.looks <= 5 * 11
    assert needed_blocks(index, list(range(900))) == {}


def test_a_match_of_a_prompt_that_nobody_holds_ends_at_its_first_block() -> None:
    index = PrefixIndex()
    index.stored(0, list(range(1, 50)))
    Counting.looks = 0
    assert index.deepest(-1, [Counting(i) for i in range(50)]) == (0, 0)
    assert Counting.looks <= 2


def test_blocks_that_are_stored_again_are_forgotten_last() -> None:
    index = PrefixIndex(max_blocks=4)
    for prompt in ((1, 2), (3, 4), (1, 2), (5, 6)):
        index.stored(0, prompt)
    assert [index.blocks_on(0, prompt) for prompt in ((1, 2), (3, 4), (5, 6))] == [2, 0, 2]

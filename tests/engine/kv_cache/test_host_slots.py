"""Slots of the host tier, and the tier behind a pool, against models of both."""

from __future__ import annotations

import pytest
from harness.engine.doubles import ScriptedRunner
from harness.engine.host_doubles import ScriptedCopies
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from parrot_engine.exceptions import BlockStateError
from parrot_engine.kv_cache.block_hash import block_hash, root_hash, short_hash
from parrot_engine.kv_cache.host_slots import HostSlots
from parrot_engine.kv_cache.host_tier import HostTier
from parrot_engine.protocol import Retention

NAMES = "abcdefgh"


def digest(name: str) -> bytes:
    return block_hash(root_hash("host"), [ord(name)])


# Slots


def test_the_oldest_copy_goes_and_is_told() -> None:
    dropped: list[bytes] = []
    slots = HostSlots(2, dropped.append)
    assert [slots.take(b"a"), slots.take(b"b")] == [0, 1]
    slots.begin_read(b"a")
    slots.end_read(0)
    assert slots.take(b"c") == 1
    assert (dropped, list(slots), len(slots)) == ([b"b"], [b"a", b"c"], 2)
    slots.check_integrity()


def test_what_is_read_is_not_dropped() -> None:
    slots = HostSlots(1, lambda _: None)
    slots.take(b"a")
    assert slots.begin_read(b"a") == 0
    assert slots.take(b"b") is None
    slots.end_read(0)
    assert slots.take(b"b") == 0


def test_a_copy_forgotten_while_it_is_read_keeps_its_slot() -> None:
    slots = HostSlots(2, lambda _: None)
    slots.take(b"a")
    slots.begin_read(b"a")
    slots.forget(b"a")
    slots.forget(b"a")
    assert slots.find(b"a") is None
    assert slots.take(b"a") == 1
    slots.check_integrity()
    assert slots.take(b"b") == 1
    slots.end_read(0)
    assert slots.take(b"c") == 0
    slots.check_integrity()


def test_mistakes_are_refused() -> None:
    slots = HostSlots(1, lambda _: None)
    slots.take(b"a")
    with pytest.raises(BlockStateError, match="second copy"):
        slots.take(b"a")
    with pytest.raises(BlockStateError, match="not being read"):
        slots.end_read(0)


# The tier behind a pool


class TierMachine(RuleBasedStateMachine):
    """Content is a name. Whoever finds a block by its hash must find its name in it."""

    references = Bundle("references")

    @initialize(
        num_blocks=st.integers(2, 6),
        num_slots=st.integers(1, 6),
        reserve=st.integers(1, 6),
        chunk=st.integers(1, 3),
        seed=st.one_of(st.none(), st.integers(0, 9)),
    )
    def create(
        self, num_blocks: int, num_slots: int, reserve: int, chunk: int, seed: int | None
    ) -> None:
        self.runner = ScriptedRunner(num_blocks=num_blocks, block_size=1)
        self.copies = ScriptedCopies(self.runner, num_slots=num_slots, chunk=chunk, seed=seed)
        self.tier = HostTier(num_blocks, self.copies, reserve=reserve, least_blocks=1)
        self.pool = self.tier.pool
        self.held: list[int] = []
        self.told: set[int] = set()

    @rule(target=references, names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    def compute(self, names: list[str]) -> object:
        """A step that writes blocks nobody has."""
        new = [name for name in dict.fromkeys(names) if self.pool.find(digest(name)) is None]
        blocks = [self.pool.allocate() for _ in new[: self.pool.num_free]]
        self.tier.before_launch()
        for name, block in zip(new, blocks, strict=False):
            self.runner.slots[block] = [name.encode()]
        self.tier.after_launch()
        for name, block in zip(new, blocks, strict=False):
            assert self.pool.register(block, digest(name)) == block
        self.held += blocks
        return multiple(*blocks)

    @rule(target=references, name=st.sampled_from(NAMES))
    def find(self, name: str) -> object:
        block = self.pool.find(digest(name))
        if block is None:
            return multiple()
        assert self.runner.slots[block] == [name.encode()], "another's content"
        self.pool.retain(block)
        self.held.append(block)
        return block

    @rule(block=consumes(references), retention=st.sampled_from(["keep", "normal", "drop"]))
    def release(self, block: int, retention: Retention) -> None:
        self.held.remove(block)
        self.pool.release(block, retention)

    @rule(block=references)
    def withdraw(self, block: int) -> None:
        name = self.pool.digest(block)
        self.pool.withdraw(block)
        assert name is None or name not in self.tier.slots

    @rule()
    def copy_ahead(self) -> None:
        self.tier.copy_ahead([self.held[:2], self.held[2:]])

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def fetch(self, names: list[str]) -> None:
        wanted = [
            digest(name)
            for name in dict.fromkeys(names)
            if digest(name) in self.tier.slots
            and self.pool.find(digest(name)) is None
            and not self.tier.is_loading(digest(name))
        ]
        before = self.pool.num_free
        assert self.tier.load(wanted, before) == before - self.pool.num_free

    @rule()
    def collect(self) -> None:
        self.tier.collect()

    @rule()
    def tell(self) -> None:
        stored, evicted = self.pool.take_changes()
        assert not self.told & set(stored)
        assert set(evicted) <= self.told
        self.told = (self.told | set(stored)) - set(evicted)
        there = [
            short_hash(digest(name))
            for name in NAMES
            if self.pool.find(digest(name)) is not None or digest(name) in self.tier.slots
        ]
        assert self.told == set(there)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity([self.held])
            self.tier.check_integrity()
            assert len(self.tier.slots) <= self.copies.num_slots

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for _ in range(1000):
                self.tier.collect()
                if not self.tier.is_loading_any:
                    break
            self.pool.release_table(self.held)
            assert self.pool.num_free == self.pool.num_blocks, "a block is lost"
            for name in NAMES:
                block = self.pool.find(digest(name))
                assert block is None or self.runner.slots[block] == [name.encode()]


TierMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTierMachine = TierMachine.TestCase

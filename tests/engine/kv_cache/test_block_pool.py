"""The block pool: states of blocks, the prefix index, eviction."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from parrot_engine.exceptions import BlockStateError
from parrot_engine.kv_cache.block_hash import block_hash, prompt_hashes, root_hash, short_hash
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.protocol import Retention


def digest(name: str) -> bytes:
    return block_hash(root_hash("test"), [ord(char) for char in name])


def cached(pool: BlockPool, count: int, name: str = "") -> list[int]:
    """Blocks in use, each registered under the name and its place."""
    table = [pool.allocate() for _ in range(count)]
    for index, block in enumerate(table):
        pool.register(block, digest(f"{name}{index}"))
    return table


def test_new_pool_is_free() -> None:
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_cached) == (3, 0)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(BlockStateError, match="all 3 blocks are in use"):
        pool.allocate()


def test_withdrawn_block_is_not_found() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.register(block, digest("a"))
    pool.withdraw(block)
    assert pool.find(digest("a")) is None
    pool.release(block)
    assert pool.num_cached == 0
    assert pool.register(pool.allocate(), digest("a")) == block


def test_registered_block_outlives_its_owner() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.register(block, digest("a"))
    pool.release(block)
    assert (pool.num_free, pool.num_cached) == (2, 1)
    assert pool.find(digest("a")) == block
    pool.retain(block)
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_content_is_registered_once() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    assert pool.register(first, digest("a")) == first
    assert pool.register(second, digest("a")) == first
    assert pool.references(first) == 2
    assert pool.references(second) == 0
    pool.check_integrity([[first], [first]])


def test_free_blocks_before_cached_then_leaves_first() -> None:
    pool = BlockPool(4)
    table = cached(pool, 3)
    pool.release_table(table)
    assert pool.allocate() == 3
    assert [pool.allocate() for _ in range(3)] == table[::-1]
    assert pool.find(digest("0")) is None


def test_kept_blocks_go_last_and_dropped_ones_first_leaves_before_roots() -> None:
    pool = BlockPool(8)
    kept, normal, dropped = (cached(pool, 2, name) for name in "knd")
    rest = [pool.allocate(), pool.allocate()]
    pool.release_table(kept, "keep")
    pool.release_table(normal)
    pool.release_table(dropped, "drop")
    assert pool.num_cached == 6
    order = [pool.allocate() for _ in range(6)]
    assert order == [*dropped[::-1], *normal[::-1], *kept[::-1]]
    pool.check_integrity([rest, order])


def test_what_is_shared_is_not_one_owners_to_drop() -> None:
    pool = BlockPool(3)
    shared, own, other = cached(pool, 3)
    pool.retain(shared)
    pool.release(shared)
    pool.release(other)
    pool.release_table([shared, own], "drop")
    assert [pool.allocate() for _ in range(3)] == [own, other, shared]


def test_no_more_than_half_is_kept_before_others() -> None:
    pool = BlockPool(4)
    table = cached(pool, 4)
    for block in table:
        pool.release(block, "keep")
    pool.check_integrity([])
    # The longest kept ones are as any other.
    assert [pool.allocate() for _ in range(4)] == table
    assert pool.num_cached == 0


def test_a_kept_block_that_is_used_again_is_kept_only_if_asked_again() -> None:
    pool = BlockPool(4)
    first, second, *rest = cached(pool, 4)
    pool.release(first, "keep")
    pool.retain(first)
    pool.release(first)
    pool.release(second)
    assert pool.allocate() == first
    pool.check_integrity([[first, *rest]])


def test_what_is_kept_for_a_context_can_be_dropped_and_nothing_else() -> None:
    pool = BlockPool(10)
    finished, other, normal = cached(pool, 3, "f"), cached(pool, 2, "o"), cached(pool, 2, "n")
    rest = [pool.allocate() for _ in range(3)]
    # The root has a second owner: it is not the context's own to drop.
    pool.retain(finished[0])
    pool.release(finished[0])
    pool.release_table(finished, "keep", 1)
    pool.release_table(other, "keep", 2)
    pool.release_table(normal)
    pool.drop_kept(1)
    pool.check_integrity([rest])
    order = [pool.allocate() for _ in range(7)]
    assert order == [*finished[:0:-1], *normal[::-1], finished[0], *other[::-1]]


def test_dropping_leaves_alone_what_is_in_use_again_or_kept_for_another() -> None:
    pool = BlockPool(8)
    used, taken_over, gone = cached(pool, 3)
    rest = [pool.allocate() for _ in range(5)]
    pool.release_table([used, taken_over, gone], "keep", 1)
    pool.retain(used)
    pool.retain(taken_over)
    pool.release(taken_over, "keep", 2)
    for context_id in (1, 1, 7):
        pool.drop_kept(context_id)
    pool.check_integrity([[used, *rest]])
    assert [pool.allocate(), pool.allocate()] == [gone, taken_over]


def test_use_makes_recent() -> None:
    pool = BlockPool(2)
    old, new = cached(pool, 2)
    pool.release(old)
    pool.release(new)
    pool.retain(old)
    pool.release(old)
    pool.allocate()
    assert pool.find(digest("0")) == old
    assert pool.find(digest("1")) is None


@pytest.mark.parametrize("method", ["retain", "release", "withdraw"])
def test_free_block_refuses(method: str) -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(BlockStateError) as caught:
        getattr(pool, method)(block)
    assert caught.value.story[:2] == ("allocated", "released")
    assert f"block {block}" in str(caught.value)


def test_registering_twice_or_unused_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(BlockStateError, match="unused"):
        pool.register(0, digest("a"))
    block = pool.allocate()
    pool.register(block, digest("a"))
    with pytest.raises(BlockStateError, match="registered twice"):
        pool.register(block, digest("b"))


def test_integrity_finds_leak_and_stolen_reference() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.check_integrity([[block]])
    with pytest.raises(BlockStateError, match="1 references, but 0 holders"):
        pool.check_integrity([])
    with pytest.raises(BlockStateError, match="1 references, but 2 holders"):
        pool.check_integrity([[block], [block]])


def test_hash_covers_salt_parent_and_order() -> None:
    root = root_hash("a")
    assert root != root_hash("b")
    assert root != root_hash("")
    child = block_hash(root, [1, 2])
    assert child == block_hash(root_hash("a"), (1, 2))
    others = [
        block_hash(root, [2, 1]),
        block_hash(root, [1, 2, 0]),
        block_hash(root, [1]),
        block_hash(root_hash("b"), [1, 2]),
        block_hash(child, [1, 2]),
        block_hash(root, [1 | 2 << 8, 0]),
    ]
    assert len({child, *others}) == len(others) + 1


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model: who holds what, and what is registered as what."""

    references = Bundle("references")

    @initialize(size=st.integers(1, 6))
    def create(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.held: Counter[int] = Counter()
        self.names: dict[int, str] = {}

    @rule(target=references)
    def allocate(self) -> object:
        free = self.pool.num_blocks - len(+self.held)
        assert self.pool.num_free == free
        if free == 0:
            with pytest.raises(BlockStateError):
                self.pool.allocate()
            return multiple()
        unnamed = free - self.pool.num_cached
        block = self.pool.allocate()
        assert self.held[block] == 0, "a block in use was given away"
        assert (block in self.names) == (unnamed == 0), "a prefix was evicted without need"
        self.names.pop(block, None)
        self.held[block] = 1
        return block

    @rule(target=references, block=references)
    def retain(self, block: int) -> int:
        self.pool.retain(block)
        self.held[block] += 1
        return block

    @rule(
        block=consumes(references),
        retention=st.sampled_from(["keep", "normal", "drop"]),
        context_id=st.integers(0, 2),
    )
    def release(self, block: int, retention: Retention, context_id: int) -> None:
        self.pool.release(block, retention, context_id)
        self.held[block] -= 1

    @rule(context_id=st.integers(0, 2))
    def drop_kept(self, context_id: int) -> None:
        self.pool.drop_kept(context_id)

    @rule(target=references, block=consumes(references), name=st.sampled_from("abcd"))
    def register(self, block: int, name: str) -> int:
        if block in self.names:
            with pytest.raises(BlockStateError):
                self.pool.register(block, digest(name))
            return block
        known = next((other for other, its in self.names.items() if its == name), None)
        result = self.pool.register(block, digest(name))
        assert result == (block if known is None else known)
        self.names[result] = name
        self.held[block] -= 1
        self.held[result] += 1
        return result

    @rule(block=references)
    def withdraw(self, block: int) -> None:
        self.pool.withdraw(block)
        self.names.pop(block, None)

    @precondition(lambda self: self.names)
    @rule(target=references, data=st.data())
    def take_cached(self, data: st.DataObject) -> int:
        block = data.draw(st.sampled_from(sorted(self.names)))
        found = self.pool.find(digest(self.names[block]))
        assert found == block
        self.pool.retain(block)
        self.held[block] += 1
        return block

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity([list(self.held.elements())])
            for block in range(self.pool.num_blocks):
                assert self.pool.references(block) == self.held[block]
            for name in "abcd":
                holder = next((block for block, its in self.names.items() if its == name), None)
                assert self.pool.find(digest(name)) == holder


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_changes_of_the_index_are_told_once_and_cancel_out() -> None:
    pool = BlockPool(2)
    first, second = cached(pool, 2)
    pool.withdraw(second)
    assert pool.take_changes() == ([short_hash(digest("0"))], [])
    assert pool.take_changes() == ([], [])
    pool.release(first)
    pool.release(second)
    pool.allocate()
    pool.allocate()
    assert pool.take_changes() == ([], [short_hash(digest("0"))])


def test_a_block_that_went_and_came_back_has_not_changed() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.register(block, digest("a"))
    pool.take_changes()
    pool.withdraw(block)
    pool.register(block, digest("a"))
    assert pool.take_changes() == ([], [])
    assert pool.take_changes(everything=True) == ([short_hash(digest("a"))], [])


@given(st.lists(st.integers(0, 2**31), max_size=40), st.integers(1, 7), st.text(max_size=3))
def test_prompt_hashes_are_those_of_the_full_blocks(
    tokens: list[int], size: int, salt: str
) -> None:
    parent, expected = root_hash(salt), []
    for end in range(size, len(tokens) + 1, size):
        parent = block_hash(parent, tokens[end - size : end])
        expected.append(short_hash(parent))
    assert prompt_hashes(tokens, size, salt) == tuple(expected)

"""The recipes: the paper's applications with its numbers, and agents, with texts of their own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from parrot_bench.apps.comparison import at_load, distinct_tokens, salted
from parrot_bench.apps.recipes import BY_WAY, MANY, Recipe
from parrot_bench.apps.workload import Size, Workload

SALT = "Copy 000000000001."
OTHER = "Copy 000000000002."
RECIPES = {
    **{f"by way: {name}": recipe for name, recipe in BY_WAY.items()},
    **{f"many: {name}": recipe for name, recipe in MANY.items()},
}


def made(
    recipe: Recipe, salt: str = SALT, count: int = 0, scale: float = 0, seed: int = 0
) -> Workload:
    return recipe.build(Size(count or recipe.count, scale or recipe.scale, seed=seed), salt)


def build(app: str, count: int = 0, scale: float = 1.0, seed: int = 0) -> Workload:
    """An application of the paper at its own lengths."""
    return made((MANY | BY_WAY)[app], SALT, count, scale, seed)


def sent(workload: Workload) -> list[str]:
    """All calls as text."""
    return [
        "\n".join(message["content"] for message in call.messages("<{}>".format))
        for call in workload.calls
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_workloads_are_sound(name: str) -> None:
    workload = made(RECIPES[name])
    names = [call.name for call in workload.calls]
    assert len(set(names)) == len(names)
    seeds = [call.seed for call in workload.calls]
    told_apart = set(zip(sent(workload), seeds, strict=True))
    assert len(told_apart) == len(names), "the same call twice could be answered once"
    for job in workload.jobs:
        known: set[str] = set()
        for call in job.calls:
            assert known.issuperset(call.reads), "producers come first"
            known.add(call.name)
        assert known.issuperset(job.finals)
        read = {name for call in job.calls for name in call.reads} | set(job.finals)
        assert read == known, "a call whose output nobody reads"
    assert workload == made(RECIPES[name]), "the same every time"


@pytest.mark.parametrize("name", RECIPES)
def test_prompts_begin_with_their_templates_words(name: str) -> None:
    """Copies agree up to the salt and nowhere behind it; arrivals and pauses are the same."""
    one, other = made(RECIPES[name]), made(RECIPES[name], OTHER)
    for first, second in zip(sent(one), sent(other), strict=True):
        head, _, tail = first.partition(SALT)
        assert head.strip()
        assert second.startswith(head + OTHER)
        assert tail
    assert [job.arrives_s for job in one.jobs] == [job.arrives_s for job in other.jobs]
    assert [call.pause_s for call in one.calls] == [call.pause_s for call in other.calls]


@pytest.mark.parametrize("app", BY_WAY)
def test_scale_changes_lengths_only(app: str) -> None:
    whole, quarter = build(app), build(app, scale=0.25)
    assert [call.reads for call in whole.calls] == [call.reads for call in quarter.calls]
    for large, small in zip(whole.calls, quarter.calls, strict=True):
        assert small.tokens == max(1, round(large.tokens / 4))
        assert len(small.text(str)) <= len(large.text(str))


def test_chain() -> None:
    workload = build("chain")
    (job,) = workload.jobs
    assert len(job.calls) == 20
    assert job.calls[0].reads == ()
    for before, call in zip(job.calls, job.calls[1:], strict=False):
        assert call.reads == (before.name,)
    assert {call.tokens for call in job.calls} == {50}
    assert job.finals == (job.calls[-1].name,)
    for call in job.calls:
        assert 1024 * 3.6 * 0.98 < len(call.text(lambda _: "")) < 1024 * 3.6 + 500


def test_map_reduce() -> None:
    (job,) = build("map-reduce").jobs
    *maps, reduce = job.calls
    assert len(maps) == 16
    assert all(call.reads == () for call in maps)
    assert reduce.reads == tuple(call.name for call in maps)
    assert {call.tokens for call in job.calls} == {50}


def test_multi_agent() -> None:
    (job,) = build("multi-agent").jobs
    # Architect and coders, then four times review and revise.
    assert len(job.calls) == 1 + 8 + 4 * 16
    calls = {call.name: call for call in job.calls}
    assert calls["design"].tokens == 706
    assert [calls[f"code_{i}"].tokens for i in range(8)] == [
        506, 822, 229, 447, 417, 196, 279, 444,
    ]  # fmt: skip
    assert calls["code_3"].reads == ("design",)
    assert calls["review_0_3"].reads == tuple(f"code_{i}" for i in range(8))
    assert calls["revise_0_3"].reads == (*(f"code_{i}" for i in range(8)), "review_0_3")
    assert calls["review_1_0"].reads == tuple(f"revise_0_{i}" for i in range(8))
    assert job.finals == tuple(f"revise_3_{i}" for i in range(8))
    (larger,) = build("multi-agent", count=16).jobs
    assert {call.name: call for call in larger.calls}["code_11"].tokens == calls["code_3"].tokens


def test_agents_of_a_round_share_most_of_their_prompts() -> None:
    calls = {call.name: call for call in build("multi-agent").calls}
    for turn in ("code", "review_2", "revise_2"):
        first, second = calls[f"{turn}_0"], calls[f"{turn}_1"]
        shared = [a for a, b in zip(first.prompt, second.prompt, strict=True) if a == b]
        assert len(shared) >= len(first.prompt) - 2
        assert isinstance(first.prompt[0], str)
        assert first.prompt[0] == second.prompt[0]


def test_chat() -> None:
    workload = build("chat")
    chats = [job for job in workload.jobs if job.kind == "chat"]
    summaries = [job for job in workload.jobs if job.kind == "map-reduce"]
    assert (len(chats), len(summaries)) == (40, 9)
    assert [job.arrives_s for job in chats] == list(range(40))
    assert [job.arrives_s for job in summaries] == [15, 15.5, 16, 26, 26.5, 27, 37, 37.5, 38]
    for job in chats:
        (call,) = job.calls
        assert call.objective == "latency"
        prompt = len(call.text(str)) / 3.6
        assert call.tokens >= 4
        assert prompt <= 1024 + 10
        assert prompt + call.tokens <= 2048 + 10
    assert all(call.objective == "throughput" for job in summaries for call in job.calls)
    assert len({job.tokens for job in chats}) > 20


def test_gpts() -> None:
    workload = build("gpts")
    calls = workload.calls
    assert len(calls) == 40
    kinds = {call.name.rpartition("_")[0].rpartition("_")[0] for call in calls}
    assert kinds == {"productivity", "image_generation", "programming", "data_analysis"}
    for kind, system, answer in (("productivity", 7437, 704), ("image_generation", 1116, 89)):
        alike = [call for call in calls if call.name.startswith(kind)]
        assert len(alike) == 10
        assert {call.tokens for call in alike} == {answer}
        texts = [call.text(str).rpartition("\n") for call in alike]
        assert len({head for head, _, _ in texts}) == 1, "the system prompt is shared"
        assert len({query for _, _, query in texts}) == 10
        assert len(texts[0][0]) / 3.6 == pytest.approx(system, rel=0.02)
    arrivals = [job.arrives_s for job in workload.jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(40 / 0.25, rel=0.5)


@pytest.mark.parametrize("app", ["gpts", "mixed", "agents", "map-reduce"])
def test_a_seed_draws_lengths_or_arrivals(app: str) -> None:
    def shape(workload: Workload) -> list[object]:
        return [(job.arrives_s, [call.tokens for call in job.calls]) for job in workload.jobs]

    assert shape(made(MANY[app], SALT, 8, 1.0)) == shape(made(MANY[app], SALT, 8, 1.0, 0))
    assert shape(made(MANY[app], SALT, 8, 1.0)) != shape(made(MANY[app], SALT, 8, 1.0, 1))


def test_documents_are_summaries_one_after_the_other() -> None:
    workload = made(MANY["map-reduce"], SALT, 0, 1.0)
    assert len(workload.jobs) == 24
    names = [call.name for call in workload.calls]
    assert len(set(names)) == len(names) == 24 * 17
    arrivals = [job.arrives_s for job in workload.jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(23 * 2.0, rel=0.5)
    twice = at_load(workload, 2.0)
    assert [job.arrives_s for job in twice.jobs] == [seconds / 2 for seconds in arrivals]


def test_summaries_beside_chats_are_of_one_document() -> None:
    workload = build("mixed")
    summaries = [job for job in workload.jobs if job.kind == "map-reduce"]
    assert len(summaries) == 9
    for number in range(16):
        alike = [job.calls[number] for job in summaries]
        assert len({call.text(str) for call in alike}) == 1
        assert len({call.seed for call in alike}) == 9
    assert len({job.calls[0].text(str) for job in workload.jobs if job.kind == "chat"}) == 40


def test_agents_hold_all_that_was_said_before_and_wait_for_their_tools() -> None:
    for app, systems in (("agents", 3), ("sessions", 1)):
        workload = made(MANY[app])
        chats = [[call.messages("<{}>".format) for call in job.calls] for job in workload.jobs]
        assert len({turns[0][0]["content"] for turns in chats}) == systems
        for job, turns in zip(workload.jobs, chats, strict=True):
            assert len(turns) >= 2
            for before, after in pairwise(turns):
                assert after[: len(before)] == before
                assert [message["role"] for message in after[len(before) :]] == [
                    "assistant",
                    "user",
                ]
            assert job.calls[0].pause_s == 0
            assert all(call.pause_s > 0 for call in job.calls[1:])
            assert job.calls[-1].reads == tuple(call.name for call in job.calls[:-1])


def test_contexts_fit_the_demo_model() -> None:
    for app, recipe in MANY.items():
        _, longest = distinct_tokens(made(recipe), Size(0, 0).characters_per_token)
        assert longest < 1900, (app, recipe.scale)


@pytest.mark.parametrize("app", MANY)
def test_a_salt_comes_before_all_else(app: str) -> None:
    """And is the same for all calls: what they share within a round stays shared."""
    plain = made(MANY[app], SALT, 4, 0.1)
    changed = salted(plain, "Salt")
    for call, before in zip(changed.calls, plain.calls, strict=True):
        (first, *others), (was, *rest) = (c.messages("<{}>".format) for c in (call, before))
        assert first == {**was, "content": "Salt\n" + was["content"]}
        assert others == rest
        assert replace(call, prompt=(), history=()) == replace(before, prompt=(), history=())

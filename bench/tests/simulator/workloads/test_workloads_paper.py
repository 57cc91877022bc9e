"""The generators of the paper's experiments make exactly the calls that the paper counts."""

from __future__ import annotations

from collections import Counter
from statistics import mean, pstdev

import pytest
from parrot_bench.applications.figures import (
    COPILOT_OUTPUTS,
    COPILOT_PROMPTS,
    COPILOT_SYSTEM_TOKENS,
    MORE_PAPERS,
    PAPERS,
    chunks,
)
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan
from parrot_bench.simulator.workloads import Generator, build
from parrot_scheduler.task import LATENCY, THROUGHPUT


def prompt_tokens(call: CallPlan) -> int:
    return sum(segment.tokens for segment in call.prompt)


def everything(workload: Generator) -> list[ApplicationPlan]:
    """All plans, closed loops followed to their end."""
    plans = list(workload.arrivals())
    for plan in plans:
        following = workload.successor(plan, plan.arrival_s + 1.0)
        if following is not None:
            plans.append(following)
    return plans


def test_papers_have_the_recorded_sizes() -> None:
    assert len(PAPERS) == 10
    assert len(MORE_PAPERS) == 30
    assert (min(PAPERS), max(PAPERS)) == (60955, 129707)
    assert round(mean(PAPERS), -3) == 82000
    assert round(mean(MORE_PAPERS), -3) == 67000
    assert min(sum(chunks(size, 1024, "tokens")) for size in PAPERS) > 20_000


def test_the_artifacts_splitter_gives_as_many_calls_as_round_trips_were_measured() -> None:
    """91.2 s without and 75.4 s with the graph at chunk 1024, 244 ms a round trip (figure 11)."""
    for chunk, without, with_graph in ((512, 176.3, 145.2), (1024, 91.2, 75.4), (2048, 48.8, 41.2)):
        calls = mean(len(chunks(size, chunk, "artifact")) for size in PAPERS)
        assert calls == pytest.approx((without - with_graph) / 0.244, rel=0.06)


def test_chunks_add_up_whatever_the_splitter() -> None:
    for size in PAPERS:
        assert {sum(chunks(size, 1024, s)) for s in ("artifact", "tokens")} == {round(size / 3)}


def test_chain_summaries_follow_one_another() -> None:
    plans = everything(build("chain", {"splitter": "tokens"}))
    assert [plan.id for plan in plans] == [f"paper-{n}" for n in range(10)]
    for plan in plans:
        assert [call.after for call in plan.calls] == [
            (index - 1,) if index else () for index in range(len(plan.calls))
        ]
        assert [call.successors for call in plan.calls] == list(reversed(range(len(plan.calls))))
        assert {call.output_tokens for call in plan.calls} == {50}
        assert {call.objective for call in plan.calls} == {LATENCY}
        assert plan.calls[1].prompt[1] == (("output", plan.id, 0), 50)


def test_a_call_of_the_chain_reads_the_output_that_the_call_before_it_writes() -> None:
    for name in ("chain", "map-reduce"):
        plan = next(iter(build(name, {"output_tokens": 75}).arrivals()))
        for call in plan.calls:
            read = {s.content: s.tokens for s in call.prompt if isinstance(s.content, tuple)}
            for producer in call.after:
                assert read["output", plan.id, producer] == plan.calls[producer].output_tokens


def test_the_background_is_there_at_its_rate_and_the_chain_starts_at_3_s() -> None:
    plans = list(build("chain-background", {"background_rate": 3.5, "duration_s": 1000}).arrivals())
    arrivals = [plan.arrival_s for plan in plans]
    assert arrivals == sorted(arrivals)
    kinds = Counter(plan.kind for plan in plans)
    assert kinds["chain"] == 1
    assert kinds["background"] == pytest.approx(3500, rel=0.1)
    calls = [plan.calls[0] for plan in plans if plan.kind == "background"]
    assert {(prompt_tokens(call), call.output_tokens) for call in calls} == {(512, 50)}
    assert next(plan.arrival_s for plan in plans if plan.kind == "chain") == 3.0


def test_no_background_at_rate_0() -> None:
    plans = list(build("chain-background", {"background_rate": 0, "document": 9}).arrivals())
    assert [plan.kind for plan in plans] == ["chain"]


def test_clients_start_together_each_with_its_own_paper() -> None:
    plans = list(build("chain-clients", {"count": 25}).arrivals())
    assert {plan.arrival_s for plan in plans} == {0.0}
    assert len({plan.calls[0].prompt[1].content for plan in plans}) == 25


def test_map_reduce_is_one_group_and_one_reduce() -> None:
    plans = everything(build("map-reduce", {"splitter": "tokens"}))
    assert len(plans) == 10
    *maps, reduce_call = plans[0].calls
    assert len(maps) == len(chunks(PAPERS[0], 1024, "tokens")) == 29
    assert {call.groups[0].size for call in maps} == {29}
    assert len({call.groups for call in maps}) == 1
    assert maps[0].groups[0].objective == LATENCY
    assert {call.objective for call in maps} == {THROUGHPUT}
    assert (reduce_call.objective, reduce_call.groups) == (LATENCY, ())
    assert reduce_call.after == tuple(range(29))


def test_copilot_prompts_have_the_recorded_lengths() -> None:
    plans = everything(build("copilot", {"output_tokens": 100, "batch": 64}))
    lengths = sorted(prompt_tokens(plan.calls[0]) for plan in plans)
    assert len(lengths) == 288
    assert (lengths[0], lengths[-1]) == (5224, 7492)
    assert round(mean(lengths)) == 6167
    assert lengths[144] == 6148
    assert round(pstdev(lengths)) == pytest.approx(452, abs=1)
    assert {plan.calls[0].prompt[0].tokens for plan in plans} == {5107}


def test_the_engines_study_of_figure_14_has_the_same_lengths() -> None:
    """The engine imports nothing of the simulator: it keeps quantiles of these prompts."""
    pytest.importorskip("torch")
    from parrot_bench.engine.prompts import RECORDED

    assert RECORDED.system == COPILOT_SYSTEM_TOKENS
    ordered = sorted(COPILOT_PROMPTS)
    last = len(ordered) - 1
    for share, length in RECORDED.lengths:
        assert length == ordered[min(last, int(share * len(ordered)))]
    outputs: Counter[int] = Counter()
    for tokens, count in COPILOT_OUTPUTS:
        outputs[tokens] += count
    assert dict(RECORDED.outputs) == outputs


def test_copilot_outputs_have_the_recorded_lengths() -> None:
    workload = build("copilot", {"batch": 8})
    assert len(list(workload.arrivals())) == 8
    outputs = Counter(plan.calls[0].output_tokens for plan in everything(workload))
    assert outputs.total() == 64
    assert round(sum(length * count for length, count in outputs.items()) / 64) == 331
    assert (outputs[800], outputs[360], outputs[393], outputs[183]) == (6, 6, 7, 2)
    assert len({plan.id for plan in everything(workload)}) == 64


def test_gpts_are_in_equal_shares() -> None:
    plans = list(build("gpts", {"count": 500, "rate": 4}).arrivals())
    assert Counter(plan.kind for plan in plans) == dict.fromkeys(
        ("productivity", "image-generation", "programming", "data-analysis"), 125
    )
    shapes = {
        plan.kind: (*(s.tokens for s in plan.calls[0].prompt), plan.calls[0].output_tokens)
        for plan in plans
    }
    assert shapes == {
        "productivity": (7437, 7, 704),
        "image-generation": (1116, 8, 89),
        "programming": (1694, 4, 631),
        "data-analysis": (2031, 4, 416),
    }
    assert plans[-1].arrival_s == pytest.approx(125, rel=0.2)


def test_multi_agent_has_the_recorded_lengths() -> None:
    plan = next(iter(build("multi-agent", {"branches": 8, "counting": "recorded"}).arrivals()))
    assert Counter(call.template for call in plan.calls) == {
        "architect": 8,
        "coder": 8,
        "reviewer": 32,
        "reviser": 32,
    }
    by_role = {call.template: prompt_tokens(call) for call in plan.calls}
    assert by_role == {"architect": 182, "coder": 2991, "reviewer": 3717, "reviser": 4175}
    coders = [call.output_tokens for call in plan.calls if call.template == "coder"]
    assert coders == [506, 822, 229, 447, 417, 196, 279, 444]
    assert len({call.after for call in plan.calls}) == 10


def test_multi_agent_in_llama_tokens_adds_up_to_the_artifacts_sums() -> None:
    plan = next(iter(build("multi-agent", {"branches": 8}).arrivals()))
    sums = Counter[str]()
    for call in plan.calls:
        sums[call.template] += prompt_tokens(call) + call.output_tokens
    assert sums["coder"] == pytest.approx(33654, abs=8)
    assert sums["reviewer"] / 4 == pytest.approx(42237, abs=8)
    assert sums["reviser"] / 4 == pytest.approx(47938, abs=8)


def test_branches_of_a_round_share_almost_all_of_their_prompt() -> None:
    plan = next(iter(build("multi-agent", {"counting": "recorded"}).arrivals()))
    reviews = [call for call in plan.calls if call.template == "reviewer"][:16]
    assert len({call.prompt[0] for call in reviews}) == 1
    assert reviews[0].prompt[0].tokens == pytest.approx(3717 * 15782 / 16019, abs=1)
    assert len({call.prompt[1].content for call in reviews}) == 16


def test_mixed_has_40_chats_and_9_summaries_at_the_recorded_times() -> None:
    plans = list(build("mixed").arrivals())
    chats = [plan for plan in plans if plan.kind == "chat"]
    summaries = [plan.arrival_s for plan in plans if plan.kind == "map-reduce"]
    assert [plan.arrival_s for plan in chats] == [float(second) for second in range(40)]
    assert summaries == [15, 15.5, 16, 26, 26.5, 27, 37, 37.5, 38]
    for plan in chats:
        prompt, output = prompt_tokens(plan.calls[0]), plan.calls[0].output_tokens
        assert 4 <= prompt <= 1024
        assert output >= 4
        assert prompt + output <= 2048


def test_calibration_has_100_calls_at_its_rate() -> None:
    plans = list(build("calibration", {"rate": 5}).arrivals())
    assert len(plans) == 100
    assert plans[-1].arrival_s == pytest.approx(20, rel=0.3)

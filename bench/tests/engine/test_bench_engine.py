"""`bench engine` on small models: it counts what it was asked for, and its bounds are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parrot_bench.engine import engine as command
from parrot_bench.engine.cases import GROUPS, Bench
from parrot_bench.engine.device import Bounds, Limits, Segment, bounds_of
from parrot_bench.engine.prompts import QUICK, Prompts, PromptSource, Sizes
from parrot_bench.engine.report import BenchError, CaseResult, Figure, table
from parrot_engine.loading.hub import resolve_model
from parrot_engine.models.loader import read_model_config

ENGINE = Path(__file__).parents[3] / "engine"


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration alone, small enough for every case."""
    folder = tmp_path_factory.mktemp("shapes") / "small"
    folder.mkdir()
    raw = json.loads((resolve_model("parrot-demo") / "config.json").read_text())
    raw |= {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 300, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert command.main(arguments) == 0
    caught = capsys.readouterr()
    return caught.out, caught.err


def test_all_cases(shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.json"
    out, err = run(
        capsys,
        *("--model", str(shape), "--dummy-weights", "--device", "cpu", "--quick"),
        *("--repetitions", "1", "--json", str(file)),
    )
    report = json.loads(file.read_text())
    assert report["benchmark"] == "engine"
    assert report["machine"]["packages"]["torch"] == torch.__version__
    assert report["model"]["dummy_weights"]
    assert report["limits"] is None
    assert report["ready_s"] > 0
    assert report["memory"]["end"]["process_peak_bytes"] > 0
    assert report["elapsed_s"] > report["ready_s"]
    assert "small, float32, random weights, on cpu" in out
    cases = {case["case"]: case for case in report["cases"]}
    assert list(cases) == [
        *("decode-1", "decode-4", "drawn-4", "shared", "unshared", "families", "tree"),
        *("prefill-2", "prefill-1", "long", "mixed", "load-50"),
    ]
    assert "sharing" in cases.pop("unshared")["skipped"]
    wanted = {
        # case: requests, tokens of prompts, shared ones once, generated tokens
        "decode-1": (1, 48, 48, 12),
        "decode-4": (4, 4 * 48, 4 * 48, 4 * 12),
        "drawn-4": (4, 4 * 48, 4 * 48, 4 * 12),
        "shared": (8, 8 * 208, 192 + 8 * 16, 8 * 12),
        "families": (8, 8 * 208, 2 * 192 + 8 * 16, 8 * 12),
        "tree": (8, 8 * 208, 128 + 2 * 64 + 8 * 16, 8 * 12),
        "prefill-2": (2, 512, 512, 2),
        "prefill-1": (1, 256, 256, 1),
        "long": (1, 512, 512, 4),
    }
    for name, counts in wanted.items():
        keys = ("requests", "prompt_tokens", "distinct_tokens", "output_tokens")
        assert tuple(cases[name][key] for key in keys) == counts, name
    assert cases["mixed"]["requests"] == QUICK.requests
    for name, case in cases.items():
        assert case["engine"] == "parrot"
        for label, figure in case["figures"].items():
            assert figure["median"] > 0 or label in ("step", "over_greedy"), (name, label)
            assert len(figure["runs"]) == (5 if name == "prefill-1" else 1)
            assert figure["bound"] is None
        assert f"parrot {name}:" in err
        assert name in out
    steps = [cases[name]["figures"]["step"]["median"] for name in ("drawn-4", "decode-4")]
    over = cases["drawn-4"]["figures"]["over_greedy"]["median"]
    assert over == pytest.approx(steps[0] / steps[1])
    load = cases["load-50"]["figures"]
    rate = cases["mixed"]["figures"]["requests"]["median"]
    assert load["arrivals"]["median"] == pytest.approx(0.5 * rate)
    assert load["first_token_p50"]["median"] <= load["first_token_p99"]["median"]


def test_cases_can_be_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    out, _ = run(
        capsys,
        *("--model", "parrot-demo", "--device", "cpu", "--quick", "--cases", "prefill"),
        *("--repetitions", "2", "--json", str(file)),
    )
    report = json.loads(file.read_text())
    assert [case["case"] for case in report["cases"]] == ["prefill-2", "prefill-1"]
    assert len(report["cases"][0]["figures"]["prompt_tokens"]["runs"]) == 2
    assert not report["model"]["dummy_weights"]
    assert "decode" not in out


@pytest.mark.parametrize(
    "arguments",
    [("--cases", "nonsense"), ("--repetitions", "0"), ("--peers", "nobody"), ("--dtype", "int3")],
)
def test_bad_options(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--model", "parrot-demo", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_model_that_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "./not/a/folder", "--device", "cpu"]) == 1
    assert "no folder" in capsys.readouterr().err


def test_peers_that_are_not_installed_are_named(
    shape: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "is_installed", lambda name: False)
    out, _ = run(
        capsys,
        *("--model", str(shape), "--dummy-weights", "--device", "cpu", "--quick"),
        *("--repetitions", "1", "--cases", "decode", "--peers", "vllm"),
    )
    assert "vllm all: skipped: not installed" in out


def test_it_runs_without_the_gateways_packages(tmp_path: Path) -> None:
    """On a machine with torch alone: neither tokenizers nor anything that speaks HTTP."""
    missing = ("msgspec", "fastapi", "typer", "tokenizers", "transformers", "jinja2", "rich")
    program = (
        "import sys\n"
        f"for name in {missing}: sys.modules[name] = None\n"
        "from parrot_bench.engine.engine import main\n"
        "raise SystemExit(main(sys.argv[1:]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *("--model", "parrot-demo", "--device", "cpu"),
         *("--quick", "--cases", "decode", "--repetitions", "1")],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ENGINE), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "decode-4" in ran.stdout


def test_the_command_of_the_gateway(tmp_path: Path) -> None:
    """Its options are the program's own, and its status too."""
    file = tmp_path / "engine.json"
    program = "import sys; from parrot_gateway.cli.main import main; main()"
    command_line = [sys.executable, "-c", program, "bench", "engine"]
    options = ["--model", "parrot-demo", "--device", "cpu", "--quick", "--cases", "decode"]
    ran = subprocess.run(
        [*command_line, *options, "--repetitions", "1", "--json", str(file)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "parrot decode-4: step" in ran.stderr
    assert len(json.loads(file.read_text())["cases"]) == 2
    refused = subprocess.run(
        [*command_line, "--cases", "nonsense"], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert "nonsense" in refused.stderr


class Scripted:
    """Implements `Subject`; hands out what it is told to."""

    name = "scripted"
    vocab_size = 100
    max_context_tokens: int | None = 300
    cache_tokens: int | None = 1000

    def __init__(self, lost: int = 0) -> None:
        self.lost = lost
        self.seen: list[Prompts] = []

    def generate(self, prompts: Prompts) -> list[int]:
        self.seen.append(prompts)
        return [tokens - self.lost for tokens in prompts.max_tokens]


def bench_of(subject: Scripted, **sizes: Any) -> Bench:
    return Bench(subject, PromptSource(100, 0), Sizes(**sizes), None)


def test_tokens_that_are_missing_are_an_error() -> None:
    with pytest.raises(BenchError, match="0 tokens instead of 1"):
        list(GROUPS["prefill"](bench_of(Scripted(lost=1), prefills=1, prefill=100)))


def test_what_does_not_fit_is_skipped() -> None:
    bench = bench_of(Scripted(), batches=(1, 8), prompt=200, tokens=50, prefill=400)
    small, large = GROUPS["decode"](bench)
    assert small.skipped is None
    assert "2000 tokens" in str(large.skipped)
    assert all("300" in str(result.skipped) for result in GROUPS["prefill"](bench))


def test_prompts_are_new_the_first_time_and_the_same_afterwards() -> None:
    subject = Scripted()
    list(GROUPS["decode"](bench_of(subject, batches=(2,), prompt=8, tokens=4)))
    runs = [prompts.token_ids for prompts in subject.seen]
    assert runs[0] == runs[1] == runs[2] != runs[3] == runs[4] == runs[5]
    assert [prompts.max_tokens for prompts in subject.seen[:3]] == [[4, 4], [1, 1], [4, 4]]
    again = Scripted()
    list(GROUPS["decode"](bench_of(again, batches=(2,), prompt=8, tokens=4)))
    assert [prompts.token_ids for prompts in again.seen] == runs


def test_draws_are_asked_for() -> None:
    subject = Scripted()
    sizes: dict[str, Any] = {"drawn_batches": (2,), "prompt": 8, "tokens": 4}
    [drawn] = GROUPS["drawn"](bench_of(subject, **sizes))
    assert drawn.skipped is None
    assert {(prompts.temperature, prompts.top_p) for prompts in subject.seen} == {(0.8, 0.95)}


def test_a_long_prompt_that_does_not_fit_is_skipped() -> None:
    small = bench_of(Scripted(), long=200, long_tokens=4)
    [fits] = GROUPS["long"](small)
    assert fits.skipped is None
    assert [figure.name for figure in fits.figures] == ["first_token", "step"]
    [longer] = GROUPS["long"](bench_of(Scripted(), long=400, long_tokens=4))
    assert "300" in str(longer.skipped)


def test_prompts_of_a_tree() -> None:
    prompts = PromptSource(1000, 3).tree(
        "t", 0, roots=2, root=5, groups=2, branch=3, leaves=8, own=4, tokens=6
    )
    assert [len(ids) for ids in prompts.token_ids] == [12] * 8
    starts = {tuple(ids[:5]) for ids in prompts.token_ids}
    branches = {tuple(ids[:8]) for ids in prompts.token_ids}
    assert (len(starts), len(branches)) == (2, 4)
    assert prompts.num_distinct == 2 * 5 + 4 * 3 + 8 * 4
    assert (prompts.num_output_tokens, prompts.longest) == (48, 18)


def test_mixed_prompts_cover_their_range() -> None:
    prompts = PromptSource(1000, 0).mixed("m", 0, 400, Sizes(reads=(3, 9), writes=(1, 4)))
    assert {len(ids) for ids in prompts.token_ids} == set(range(3, 10))
    assert set(prompts.max_tokens) == {1, 2, 3, 4}


def test_bounds_of_a_known_shape() -> None:
    """The figures that `bench/results/engine.md` quotes for an H200."""
    config = read_model_config(resolve_model("llama-3.1-8b", with_weights=False))
    bounds = bounds_of(config, "bfloat16", Limits(4.3e12, 790e12))
    assert isinstance(bounds, Bounds)
    weights = bounds.layer_weights + bounds.head_weights
    assert 2 * weights == pytest.approx(15.0e9, rel=0.01)
    assert bounds.kv_bytes == 131_072
    one = bounds.step_s(1, 576, 576)
    assert 1000 * one == pytest.approx(3.51, abs=0.03)
    many = bounds.step_s(256, 256 * 576, 256 * 576)
    assert 1000 * many == pytest.approx(8.0, abs=0.1)
    shared = bounds.step_s(64, 6144 + 64 * 256, 64 * 6400)
    assert 1000 * shared == pytest.approx(4.2, abs=0.1)
    tokens = 8 * 8192 / bounds.prefill_s([Segment(0, 8192)] * 8, 8)
    assert tokens == pytest.approx(50_000, rel=0.06)
    assert bounds_of(config, "bfloat16", None) is None
    two = bounds_of(config, "bfloat16", Limits(4.3e12, 790e12), devices=2)
    assert isinstance(two, Bounds)
    assert two.step_s(1, 576, 576) == pytest.approx(one / 2)
    rounded = bounds_of(config, "bfloat16", Limits(4.3e12, 790e12), kv_cache_dtype="fp8_e4m3")
    assert isinstance(rounded, Bounds)
    # A byte an element, four a head.
    assert rounded.kv_bytes == 131_072 * (128 + 4) / 256
    saved = many - rounded.step_s(256, 256 * 576, 256 * 576)
    assert saved == pytest.approx(256 * 576 * (bounds.kv_bytes - rounded.kv_bytes) / 4.3e12)


def test_figures_and_table() -> None:
    step = Figure("step", "ms", (5.0, 4.0, 6.0), bound=4.0)
    rate = Figure("rate", "tok/s", (50.0,), bound=100.0)
    assert (step.median, step.spread, step.share, rate.share) == (5.0, 0.4, 0.8, 0.5)
    ours = CaseResult("decode-1", "parrot", requests=1, output_tokens=4, figures=(step, rate))
    gain = Figure("gain", "x", (2.0,))
    ours = replace(ours, figures=(*ours.figures, gain))
    theirs = CaseResult("decode-1", "vllm", figures=(Figure("step", "ms", (7.0,)), gain))
    faster = CaseResult("decode-1", "other", figures=(Figure("rate", "tok/s", (62.5,)),))
    assert CaseResult.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    lines = table([ours, theirs, faster]).splitlines()
    assert lines[0].split() == [
        *("case", "figure", "unit", "parrot", "spread", "bound", "of", "bound"),
        *("vllm", "ours", "is", "other", "ours", "is"),
    ]
    assert lines[2].split() == [
        *("decode-1", "step", "ms", "5", "40", "%", "4", "80", "%", "7", "ahead", "1.40x", "-", "-")
    ]
    assert lines[3].split() == [
        *("decode-1", "rate", "tok/s", "50", "100", "50", "%", "-", "-", "62.5", "behind", "0.80x")
    ]
    assert lines[4].split() == ["decode-1", "gain", "x", "2", "-", "-", "-", "-"]

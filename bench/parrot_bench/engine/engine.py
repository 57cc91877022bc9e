"""How fast the builtin engine is: `parrot-gateway bench engine`, or this module on its own.

    python -m parrot_bench.engine.engine --model llama-3.1-8b --json engine.json

Through the offline API, with random token ids, greedy, past ends of text, without detokenizing.
The limits of the device are measured in the same run. Progress goes to standard error, the table to
standard output. Needs torch, numpy and, on a GPU, triton; nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from parrot_engine.exceptions import ParrotEngineError
from parrot_engine.llm import LLM
from parrot_engine.loading.factory import add_engine_flags
from parrot_engine.loading.hub import DEMO_MODEL, resolve_model, shape_names
from parrot_engine.models.loader import read_model_config, resolve_device
from parrot_engine.progress import print_line
from parrot_engine.protocol import EngineInfo

from parrot_bench.engine.cases import GROUPS, Bench, run_cases
from parrot_bench.engine.device import Limits, bounds_of, machine, measure_limits, memory
from parrot_bench.engine.formats import FORMATS, write_configuration
from parrot_bench.engine.prompts import QUICK, PromptSource, Sizes
from parrot_bench.engine.report import BenchError, CaseResult, line_of, summary, table
from parrot_bench.engine.subjects import PEERS, ParrotSubject, VllmSubject, is_installed

#: A peer may take so long in all.
_PEER_TIMEOUT_S = 3600

#: Cases that need more than a peer offers.
_OWN_CASES = ("unshared", "load")

#: Options of the command line that are options of the engine.
_ENGINE_OPTIONS = (
    "block_size", "num_blocks", "kv_cache_bytes", "kv_cache_dtype", "gpu_memory_utilization",
    "cuda_graphs", "overlap", "kernels", "max_batch_size", "max_batch_tokens",
    "max_context_tokens", "num_threads", "tensor_parallel", "enable_expert_parallel",
    "deterministic",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    unknown = sorted({*parsed.cases} - GROUPS.keys())
    if unknown:
        parser.error(f"--cases: there is no {unknown[0]!r}; there are {', '.join(GROUPS)}")
    if parsed.repetitions < 1:
        parser.error("--repetitions: at least 1")
    try:
        with ExitStack() as stack:
            if parsed.quantization is not None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                parsed.model, parsed.dummy_weights = str(_quantized(parsed, folder)), True
            _measure(parsed)
    except (ParrotEngineError, BenchError) as error:
        print_line(f"error: {error}")
        return 1
    return 0


def _quantized(parsed: argparse.Namespace, folder: Path) -> Path:
    """The configuration of the model in another format."""
    shape = resolve_model(parsed.model or "llama-3.1-8b", with_weights=False)
    return write_configuration(shape, parsed.quantization, folder)


def _measure(parsed: argparse.Namespace) -> None:
    if parsed.engine == "parrot":
        report, results = _measure_own(parsed)
        for peer in parsed.peers:
            results += _run_peer(parsed, peer, report["model"]["dtype"])
        print(summary(report, parsed.peers), table(results), sep="\n\n")
    else:
        report, results = _measure_peer(parsed)
    report["cases"] = [result.to_dict() for result in results]
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parrot-gateway bench engine",
        description="Measure the builtin engine on this machine.",
    )
    parser.add_argument(
        "--model",
        help="a folder, a hub id, parrot-demo, or with random weights "
        f"{', '.join(shape_names())} (default: llama-3.1-8b on a GPU, else parrot-demo)",
    )
    parser.add_argument(
        "--dummy-weights", action="store_true", help="random weights of the model's shape"
    )
    parser.add_argument(
        "--quantization", choices=FORMATS, help="random weights of the model's shape in this format"
    )
    parser.add_argument(
        "--cases",
        type=lambda text: text.split(","),
        default=list(GROUPS),
        metavar="NAME,NAME,…",
        help=f"of {', '.join(GROUPS)} (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="small cases, to try it out")
    parser.add_argument(
        "--peers",
        nargs="?",
        type=_peers,
        const=list(PEERS),
        default=[],
        metavar="NAME,NAME",
        help=f"the same cases on other engines that are installed: {', '.join(PEERS)}",
    )
    parser.add_argument("--repetitions", type=int, default=2, help="of each case (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and random weights")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    add_engine_flags(parser, "device", "dtype", *_ENGINE_OPTIONS)
    parser.set_defaults(device="auto", dtype="auto")
    # What is measured; peers are, in processes of their own.
    parser.add_argument(
        "--engine", choices=("parrot", *PEERS), default="parrot", help=argparse.SUPPRESS
    )
    return parser


def _peers(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"there is no {name!r}; there are {', '.join(PEERS)}")
    return names


def _measure_own(parsed: argparse.Namespace) -> tuple[dict[str, Any], list[CaseResult]]:
    device = resolve_device(parsed.device)
    model = parsed.model or ("llama-3.1-8b" if device.type == "cuda" else DEMO_MODEL)
    dummy = parsed.dummy_weights or model in shape_names()
    devices = parsed.tensor_parallel or 1
    limits = _limits(device)
    given = {name: getattr(parsed, name) for name in _ENGINE_OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    # No case is to pay for a graph that is captured in it.
    options.setdefault("cuda_graphs", "start")
    print_line(f"loading {model} …")
    begin = time.perf_counter()
    llm = LLM(
        model,
        kind="builtin",
        skip_tokenizer=True,
        dummy_weights=dummy,
        device=str(device),
        dtype=parsed.dtype,
        seed=parsed.seed,
        **options,
    )
    ready_s = time.perf_counter() - begin
    info = llm.info
    print_line(f"{info.model}: {info.device}, {info.dtype}, ready after {ready_s:.1f} s")
    config = read_model_config(resolve_model(model, with_weights=not dummy))
    report: dict[str, Any] = {
        "benchmark": "engine",
        "machine": machine(device),
        "model": {
            "name": info.model,
            "dummy_weights": dummy,
            **_of(info, "architecture", "dtype", "vocab_size", "max_context_tokens"),
        },
        "engine": {
            "options": options,
            **_of(info, "block_size", "num_blocks", "max_batch_size", "max_batch_tokens"),
        },
        "seed": parsed.seed,
        "quick": parsed.quick,
        "repetitions": parsed.repetitions,
        "limits": None if limits is None else limits._asdict(),
        "ready_s": ready_s,
        "memory": {"ready": memory(device)},
    }
    with llm:
        bench = Bench(
            ParrotSubject(llm),
            PromptSource(info.vocab_size, parsed.seed),
            QUICK if parsed.quick else Sizes(),
            bounds_of(
                config, info.dtype, limits, devices, kv_cache_dtype=parsed.kv_cache_dtype or "auto"
            ),
            parsed.repetitions,
        )
        results = _run(bench, parsed.cases)
        report["memory"]["end"] = memory(device)
    report["elapsed_s"] = time.perf_counter() - begin
    print_line(f"all cases done {report['elapsed_s']:.0f} s after the start of loading")
    del llm, bench
    gc.collect()
    if device.type == "cuda":
        # Peers measure on the same device.
        torch.cuda.empty_cache()
    return report, results


def _of(info: EngineInfo, *names: str) -> dict[str, Any]:
    return {name: getattr(info, name) for name in names}


def _measure_peer(parsed: argparse.Namespace) -> tuple[dict[str, Any], list[CaseResult]]:
    begin = time.perf_counter()
    subject = VllmSubject(
        resolve_model(parsed.model, with_weights=False),
        parsed.dtype,
        parsed.max_batch_size,
        parsed.max_batch_tokens,
        parsed.tensor_parallel or 1,
    )
    ready_s = time.perf_counter() - begin
    print_line(f"{subject.name}: ready after {ready_s:.1f} s")
    source = PromptSource(subject.vocab_size, parsed.seed)
    bench = Bench(subject, source, QUICK if parsed.quick else Sizes(), None, parsed.repetitions)
    return {"ready_s": ready_s}, _run(bench, parsed.cases)


def _run(bench: Bench, names: list[str]) -> list[CaseResult]:
    results = []
    for result in run_cases(bench, names):
        print_line(line_of(result))
        results.append(result)
    return results


def _run_peer(parsed: argparse.Namespace, peer: str, dtype: str) -> list[CaseResult]:
    """The cases on a peer, in a process of its own; what went wrong is a skipped case."""
    if not is_installed(peer):
        return [CaseResult("all", peer, skipped="not installed")]
    cases = [name for name in parsed.cases if name not in _OWN_CASES]
    if not cases:
        return [CaseResult("all", peer, skipped="these cases are measured for this engine only")]
    device = resolve_device(parsed.device)
    on_gpu = device.type == "cuda"
    values = {
        "--engine": peer,
        "--model": parsed.model or ("llama-3.1-8b" if on_gpu else DEMO_MODEL),
        "--device": str(device),
        "--dtype": dtype,
        "--cases": ",".join(cases),
        "--repetitions": parsed.repetitions,
        "--seed": parsed.seed,
        "--max-batch-size": parsed.max_batch_size or (256 if on_gpu else 64),
        "--max-batch-tokens": parsed.max_batch_tokens or (8192 if on_gpu else 512),
        "--tensor-parallel": parsed.tensor_parallel or 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peer.json"
        command = [sys.executable, "-m", "parrot_bench.engine.engine", "--json", str(file)]
        for name, value in values.items():
            command += [name, str(value)]
        try:
            status = subprocess.run(
                [*command, *(["--quick"] if parsed.quick else [])],
                stdout=sys.stderr,
                timeout=_PEER_TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return [CaseResult("all", peer, skipped=f"not done after {_PEER_TIMEOUT_S} s")]
        if status != 0:
            return [CaseResult("all", peer, skipped=f"failed with status {status}; see above")]
        return [CaseResult.from_dict(case) for case in json.loads(file.read_text())["cases"]]


def _limits(device: torch.device) -> Limits | None:
    """Limits of a GPU; what a CPU can do depends too much on who else uses it."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        limits = measure_limits()
        torch.cuda.empty_cache()
    print_line(
        f"limits: copy {limits.bytes_per_s / 1e12:.2f} TB/s, "
        f"matrix product {limits.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    return limits


if __name__ == "__main__":
    sys.exit(main())

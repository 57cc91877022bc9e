"""`bench engine` with sharing switched off, on Triton's attention in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
from harness.engine.checkpoints import CONFIGS, VOCAB_SIZE, make_checkpoint
from parrot_bench.engine.cases import GROUPS, Bench
from parrot_bench.engine.prompts import PromptSource, Sizes
from parrot_bench.engine.subjects import ParrotSubject
from parrot_engine import LLM
from parrot_engine.attention import work_list

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


def test_sharing_is_off_for_one_case_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    find = work_list.find_sharing

    def find_sharing(tables: Any, candidates: Any, *rest: int) -> Any:
        searches.append(len(candidates))
        return find(tables, candidates, *rest)

    monkeypatch.setattr(work_list, "find_sharing", find_sharing)
    folder = make_checkpoint(tmp_path / "tiny", CONFIGS["llama"])
    sizes = Sizes(sharers=2, shared=17, own=1, shared_tokens=2)
    with LLM(
        str(folder), skip_tokenizer=True, device="cpu", dtype="float32", num_blocks=32,
        kernels="triton",
    ) as llm:  # fmt: skip
        subject = ParrotSubject(llm)
        bench = Bench(subject, PromptSource(VOCAB_SIZE - 1, 0), sizes, None, repetitions=1)
        [shared] = GROUPS["shared"](bench)
        assert searches
        searches.clear()
        [unshared] = GROUPS["unshared"](bench)
        assert not searches
        assert subject.shares
    ratio = unshared.figure("step").median / shared.figure("step").median
    assert unshared.figure("gain_of_sharing").median == pytest.approx(ratio)
    assert unshared.output_tokens == shared.output_tokens == 4


def test_without_these_kernels_there_is_no_choice(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", CONFIGS["llama"])
    with LLM(
        str(folder), skip_tokenizer=True, device="cpu", dtype="float32", num_blocks=32,
        kernels="torch",
    ) as llm:  # fmt: skip
        assert not llm.share_prefixes(False)
        assert not ParrotSubject(llm).shares

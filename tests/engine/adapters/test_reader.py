"""Adapters that are refused, by name and before anything runs; and what becomes of served ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.lora_folders import ALL, make_adapter
from parrot_engine import LLM, SamplingParams
from parrot_engine.adapters.slots import AdapterSlots
from parrot_engine.exceptions import AdapterError, GenerationError, SettingsError
from parrot_engine.llm.session import Session
from parrot_engine.models.config import ModelConfig
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.families.registry import family_of
from parrot_engine.models.parts import Linear, TensorSpec
from parrot_engine.models.sharding import Shard, part_of, shard_config
from parrot_engine.protocol import Fill, FreeContext
from safetensors.torch import load_file, save_file
from torch import Tensor

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPT = [7, 8, 9] * 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "llama"
    make_checkpoint(folder, CONFIGS["llama"])
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "plain", base)


def open_llm(base: Path, **options: Any) -> LLM:
    return LLM(
        str(base), kind="builtin", skip_tokenizer=True, device="cpu", dtype="float32",
        num_blocks=64, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[LLM]:
    with open_llm(base, max_loras=2) as llm:
        yield llm


def rewritten(adapter: Path, folder: Path, change: Callable[[Any, dict[str, Tensor]], None]) -> str:
    """A copy of an adapter, with its configuration and tensors changed."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(config, tensors)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def rename(tensors: dict[str, Tensor], new: str) -> None:
    for which in ("A", "B"):
        tensors[f"{new}.lora_{which}.weight"] = tensors.pop(f"{FIRST}.lora_{which}.weight")


REFUSALS: dict[str, tuple[Callable[[Any, dict[str, Tensor]], Any], str]] = {
    "kind": (lambda c, t: c.update(peft_type="IA3"), "peft_type 'IA3' is not supported"),
    "dora": (lambda c, t: c.update(use_dora=True), "DoRA is not supported"),
    "modules": (lambda c, t: c.update(modules_to_save=["lm_head"]), "modules_to_save"),
    "bias": (lambda c, t: c.update(bias="all"), "bias 'all' is not supported"),
    "pissa": (lambda c, t: c.update(init_lora_weights="pissa_niter_4"), "changes the weights"),
    "unknown key": (lambda c, t: c.update(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
    "rank": (lambda c, t: c.update(r=17), "rank 17 is more than the 16"),
    "any rank": (lambda c, t: c.update(r=300), "rank 300 is more than 256"),
    "no rank": (lambda c, t: c.update(r=0), "r must be a positive number"),
    "alpha": (lambda c, t: c.update(lora_alpha=float("nan")), "lora_alpha must be"),
    "targets": (lambda c, t: c.update(target_modules=None), "target_modules must be"),
    "regex": (lambda c, t: c.update(target_modules="("), "no regular expression"),
    "other rank": (lambda c, t: c.update(r=8), "a rank of 8 ask for"),
    "lacks modules": (
        lambda c, t: [t.pop(f"{FIRST}.lora_{which}.weight") for which in "AB"],
        "lacks weights for model.layers.0.self_attn.q_proj",
    ),
    "lacks B": (lambda c, t: t.pop(f"{FIRST}.lora_B.weight"), "lacks lora_B of"),
    "no tensors": (lambda c, t: t.clear(), "holds no tensors"),
    "head": (lambda c, t: rename(t, "base_model.model.lm_head"), "lm_head is no module that"),
    "experts": (
        lambda c, t: rename(t, "base_model.model.model.layers.0.mlp.experts.3.up_proj"),
        "adapters of experts are not supported",
    ),
    "other tensor": (lambda c, t: t.update({"x.bias": torch.zeros(1)}), "x.bias is none of a LoRA"),
    "other base": (
        lambda c, t: t.update({f"{FIRST}.lora_A.weight": torch.zeros(4, 128)}),
        "has shape [4, 128], this model and a rank of 4 ask for [4, 64]; the adapter is for "
        "some/base",
    ),
    "nan": (
        lambda c, t: t[f"{FIRST}.lora_B.weight"].view(-1)[3].fill_(torch.nan),
        "q_proj.lora_B.weight holds values that are no finite numbers",
    ),
    "integers": (
        lambda c, t: t.update({f"{FIRST}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}),
        "is stored as torch.int8",
    ),
}


@pytest.mark.parametrize("which", REFUSALS)
def test_refused_by_name(llm: LLM, adapter: Path, tmp_path: Path, which: str) -> None:
    change, problem = REFUSALS[which]
    before = llm.adapters
    with pytest.raises(AdapterError, match=r"^bad: ") as raised:
        llm.load_adapter("bad", rewritten(adapter, tmp_path / "bad", change))
    assert problem in str(raised.value)
    assert llm.adapters == before


def test_pickles_and_missing_files_are_refused(llm: LLM, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is no folder"):
        llm.load_adapter("bad", str(tmp_path / "nothing"))
    with pytest.raises(AdapterError, match=r"adapter_config.json cannot be read"):
        llm.load_adapter("bad", str(tmp_path))
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(AdapterError, match=r"there is no adapter_model.safetensors"):
        llm.load_adapter("bad", str(tmp_path))
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(AdapterError, match=r"adapter_model.bin is a pickle.*save_file"):
        llm.load_adapter("bad", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(AdapterError, match="cannot be read"):
        llm.load_adapter("bad", str(tmp_path))


def test_no_room_no_adapters(base: Path, adapter: Path) -> None:
    with open_llm(base) as llm, pytest.raises(AdapterError, match="no room for adapters"):
        llm.load_adapter("any", str(adapter))
    with pytest.raises(SettingsError, match="max_loras: 0, but there are"):
        open_llm(base, adapters={"any": str(adapter)}, max_loras=0)
    with pytest.raises(SettingsError, match="huggingface engine takes none"):
        LLM(str(base), kind="huggingface", adapters={"any": str(adapter)})


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("phi3", 4), ("qwen3", 4)])
def test_parts_of_an_adapter_are_those_of_its_products(
    name: str, size: int, tmp_path: Path
) -> None:
    """Over tensor-parallel ranks A is divided by the columns of a product, B by its rows."""
    base = make_checkpoint(tmp_path / "base", CONFIGS[name])
    fused = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    folder = make_adapter(tmp_path / "adapter", base, targets=fused if name == "phi3" else ALL)
    raw = json.loads((base / "config.json").read_text())
    family, spec = family_of(raw), TensorSpec(torch.device("cpu"), torch.float32)
    config = family.read_config(raw)

    def slots(config: ModelConfig, whole: tuple[Decoder, Shard] | None = None) -> AdapterSlots:
        return AdapterSlots(family.build(config, spec), 1, 16, spec.device, spec.dtype, whole=whole)

    alone = slots(config)
    expected = alone.read(folder)
    for rank in range(size):
        shard = Shard(rank, size)
        part = slots(shard_config(config, shard), (alone.model, shard))
        own = part.read(folder)
        assert own.id == expected.id
        for path, pairs in own.weights.items():
            product = part.model.get_submodule(path)
            assert isinstance(product, Linear)
            for got, whole, rows in zip(
                pairs, expected.weights[path], product.parts.values(), strict=True
            ):
                assert got is not None
                assert whole is not None
                (a, b), (whole_a, whole_b) = got, whole
                assert a.shape[1] == product.weight.shape[1]
                assert len(b) == rows
                columns, share = (
                    part_of(of_whole.shape, of_part.shape, shard)
                    for of_whole, of_part in ((whole_a, a), (whole_b, b))
                )
                assert torch.equal(a, whole_a[columns])
                assert torch.equal(b, whole_b[share])


def test_ranks_up_to_256_are_given_room(base: Path, tmp_path: Path) -> None:
    large = make_adapter(tmp_path / "large", base, rank=256, targets=["q_proj"])
    with open_llm(base, adapters={"large": str(large)}) as llm:
        assert [info.rank for info in llm.adapters] == [256]
        assert llm.generate([PROMPT], PARAMS, adapter="large")


def test_reloading_and_unloading(llm: LLM, base: Path, adapter: Path, tmp_path: Path) -> None:
    """Other weights under the same name share nothing; contexts there are go on with theirs."""
    other = make_adapter(tmp_path / "other", base, seed=9)
    first = llm.load_adapter("name", str(adapter))
    assert llm.load_adapter("twin", str(adapter)).id == first.id
    [output] = llm.generate([PROMPT], PARAMS, adapter="name")
    with llm.context(adapter="name") as context:
        context.fill(PROMPT)
        assert llm.load_adapter("name", str(other)).id != first.id
        llm.unload_adapter("twin")
        [changed] = llm.generate([PROMPT], PARAMS, adapter="name")
        assert changed.cached_tokens == 0
        assert changed.outputs[0].token_ids != output.outputs[0].token_ids
        with context.fork() as child:
            assert child.generate(PARAMS).token_ids == output.outputs[0].token_ids
    llm.load_adapter("name", str(adapter))
    [again] = llm.generate([PROMPT], PARAMS, adapter="name")
    assert again.cached_tokens == 32
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    llm.unload_adapter("name")
    llm.unload_adapter("name")
    with pytest.raises(ValueError, match="no adapter 'name' is loaded"):
        llm.generate([PROMPT], PARAMS, adapter="name")
    assert llm.adapters == []


def test_an_unknown_id_fails_its_context_alone(llm: LLM) -> None:
    session = Session(llm._engine)
    with pytest.raises(GenerationError, match="unknown_adapter: adapter: ffff is not loaded"):
        session.call(Fill(session.new_id(), PROMPT, adapter="ffff"))
    context = session.new_id()
    session.call(Fill(context, PROMPT))
    with pytest.raises(GenerationError, match="created with another one"):
        session.call(Fill(context, PROMPT, adapter="ffff"))
    session.engine.submit([FreeContext(context)])

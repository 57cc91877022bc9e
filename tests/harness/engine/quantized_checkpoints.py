"""Small quantised checkpoints, written by the definitions of their formats.

Nothing here is shared with the engine's readers. Each checkpoint comes with the dense one that its
codes and scales stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from harness.engine.checkpoints import CONFIGS, make_checkpoint

#: Quantises a weight, `[out, in]` float32; its tensors by suffix, and the weight they stand for.
Write: TypeAlias = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]

GROUP = 32
BLOCK = 64
#: Places of columns 0 to 7 in a word of AWQ: what lies in bits 4 i to 4 i + 3.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class Form(NamedTuple):
    """A format: its `quantization_config`, and what writes a weight."""

    config: dict[str, Any]
    write: Write


class Written(NamedTuple):
    """A quantised checkpoint, and the dense one that it stands for."""

    path: Path
    dense: Path


def _words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes along the last axis to int32 words, lowest bits first."""
    count = 32 // bits
    assert codes.shape[-1] % count == 0
    codes = codes.long().unflatten(-1, (-1, count))
    words = (codes << (bits * torch.arange(count))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _grouped(
    weight: Tensor, bits: int, *, symmetric: bool, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned codes, float16 scales and zero points of groups of columns, and the weight."""
    out_size, in_size = weight.shape
    if groups is None:
        groups = torch.arange(in_size) // GROUP
    count = int(groups.max()) + 1
    top = 2**bits - 1
    codes = torch.empty(out_size, in_size)
    scales = torch.empty(out_size, count, dtype=torch.float16)
    zeros = torch.empty(out_size, count)
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            scale = (2 * part.abs().amax(1) / top).half()
            zero = torch.full((out_size,), float(2 ** (bits - 1)))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / top).half()
            zero = (-low / scale.float()).round().clamp(1, top)
        scales[:, group], zeros[:, group] = scale, zero
        rounded = (part / scale.float()[:, None]).round() + zero[:, None]
        codes[:, groups == group] = rounded.clamp(0, top)
    dense = (codes - zeros[:, groups]) * scales.float()[:, groups]
    return codes, scales, zeros, dense


def _act_order(in_size: int) -> Tensor:
    """Groups of columns that do not follow each other, of equal size."""
    generator = torch.Generator().manual_seed(in_size)
    return (torch.randperm(in_size, generator=generator) // GROUP).to(torch.int32)


def _awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, dense = _grouped(weight, 4, symmetric=False)

    def words(values: Tensor) -> Tensor:
        values = values.t()
        return _words(values.unflatten(1, (-1, 8))[..., list(AWQ_COLUMNS)].flatten(1), 4)

    tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.t()}
    return tensors, dense


def _gptq(bits: int, *, symmetric: bool, act_order: bool, stored_zero: int) -> Write:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        in_size = weight.shape[1]
        groups = _act_order(in_size) if act_order else torch.arange(in_size) // GROUP
        codes, scales, zeros, dense = _grouped(weight, bits, symmetric=symmetric, groups=groups)
        tensors = {
            "qweight": _words(codes, bits).t(),
            "qzeros": _words((zeros - stored_zero).t(), bits),
            "scales": scales.t(),
            "g_idx": groups.to(torch.int32),
        }
        return tensors, dense

    return write


def _packed(bits: int, *, symmetric: bool, act_order: bool = False) -> Write:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = _act_order(weight.shape[1]) if act_order else None
        codes, scales, zeros, dense = _grouped(weight, bits, symmetric=symmetric, groups=groups)
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        dense = dense / _spread(scales.float(), groups) * _spread(scales.bfloat16().float(), groups)
        if not symmetric:
            tensors["weight_zero_point"] = _words(zeros.t(), bits).t()
        if groups is not None:
            tensors["weight_g_idx"] = groups
        return tensors, dense

    return write


def _spread(values: Tensor, groups: Tensor | None) -> Tensor:
    return values.repeat_interleave(GROUP, 1) if groups is None else values[:, groups.long()]


def _scaled(
    dtype: torch.dtype, scale_of: Callable[[Tensor], Tensor], name: str, *, static: bool = False
) -> Write:
    """8 bits: `scale_of` gives the largest magnitude for each element, and what is stored."""
    top = 448.0 if dtype == torch.float8_e4m3fn else 127.0

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = scale_of(weight.abs())
        scales = largest / top
        height, width = weight.shape
        if scales.numel() == 1:
            spread = scales.reshape(1, 1).expand(height, width)
        elif len(scales) == height:
            spread = scales.expand(height, width)
        else:
            spread = scales.repeat_interleave(BLOCK, 0)[:height].repeat_interleave(BLOCK, 1)
            spread = spread[:, :width]
        quotient = weight / spread
        codes = (quotient if dtype.is_floating_point else quotient.round()).to(dtype)
        tensors = {"weight": codes, name: scales}
        if static:
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, codes.float() * spread

    return write


def _of_tensor(magnitude: Tensor) -> Tensor:
    return magnitude.max()


def _of_rows(magnitude: Tensor) -> Tensor:
    return magnitude.amax(1, keepdim=True)


def _of_blocks(magnitude: Tensor) -> Tensor:
    height, width = magnitude.shape
    return torch.stack(
        [
            torch.stack(
                [
                    magnitude[row : row + BLOCK, column : column + BLOCK].max()
                    for column in range(0, width, BLOCK)
                ]
            )
            for row in range(0, height, BLOCK)
        ]
    )


def _compressed(form: str, weights: dict[str, Any], *, activations: bool) -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, "dynamic": False, **weights},
                "input_activations": inputs if activations else None,
            }
        },
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _gptq_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, **changes}


_FP8 = torch.float8_e4m3fn
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}

#: By a name for test ids.
FORMS: dict[str, Form] = {
    "fp8-tensor": Form(
        {"quant_method": "fp8", "activation_scheme": "static"},
        _scaled(_FP8, _of_tensor, "weight_scale", static=True),
    ),
    "modelopt": Form(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        _scaled(_FP8, _of_tensor, "weight_scale", static=True),
    ),
    "fp8-rows": Form(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        _scaled(_FP8, _of_rows, "weight_scale"),
    ),
    "fp8-blocks": Form(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "fmt": "e4m3",
        },
        _scaled(_FP8, _of_blocks, "weight_scale_inv"),
    ),
    "awq": Form({**_AWQ, "version": "gemm"}, _awq),
    "gptq": Form(_gptq_config(), _gptq(4, symmetric=True, act_order=False, stored_zero=1)),
    "gptq-v2-asymmetric": Form(
        _gptq_config(sym=False, checkpoint_format="gptq_v2"),
        _gptq(4, symmetric=False, act_order=False, stored_zero=0),
    ),
    "gptq-act-order": Form(
        _gptq_config(desc_act=True, sym=False),
        _gptq(4, symmetric=False, act_order=True, stored_zero=1),
    ),
    "gptq-8-bits": Form(
        _gptq_config(bits=8), _gptq(8, symmetric=True, act_order=False, stored_zero=1)
    ),
    "w4a16": Form(
        _compressed("pack-quantized", _INT4, activations=False), _packed(4, symmetric=True)
    ),
    "w4a16-asymmetric": Form(
        _compressed("pack-quantized", {**_INT4, "symmetric": False}, activations=False),
        _packed(4, symmetric=False),
    ),
    "w4a16-act-order": Form(
        _compressed("pack-quantized", {**_INT4, "actorder": "group"}, activations=False),
        _packed(4, symmetric=True, act_order=True),
    ),
    "w8a8-int8": Form(
        _compressed(
            "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, activations=True
        ),
        _scaled(torch.int8, _of_rows, "weight_scale"),
    ),
    "w8a8-fp8": Form(
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            activations=True,
        ),
        _scaled(_FP8, _of_rows, "weight_scale"),
    ),
}


def write_checkpoint(
    folder: Path, form: str, config: PreTrainedConfig | None = None, **options: Any
) -> Written:
    """A checkpoint in `FORMS[form]` and its dense equal, in `folder`.

    Its products but the head are quantised; `options` are those of `make_checkpoint`.
    """
    dense = make_checkpoint(folder / "dense", config or CONFIGS["llama"], **options)
    path = make_checkpoint(folder / form, config or CONFIGS["llama"], **options)
    tensors = load_file(dense / "model.safetensors")
    quantised: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        if "_proj.weight" not in name:
            quantised[name] = tensor
            continue
        stored, tensors[name] = FORMS[form].write(tensor.float())
        prefix = name.removesuffix("weight")
        quantised |= {prefix + suffix: part.contiguous() for suffix, part in stored.items()}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    save_file(quantised, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = FORMS[form].config
    (path / "config.json").write_text(json.dumps(raw))
    return Written(path, dense)

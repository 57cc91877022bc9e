"""The tables of measured tunings, as the package ships them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from parrot_engine.kernels.experts import grouped_tuning
from parrot_engine.kernels.matmul import quantized_tuning, skinny_tuning
from parrot_engine.kernels.tuning import (
    COLUMNS,
    GROUP_ROWS,
    TABLES,
    Product,
    Tuning,
    for_tokens,
    nearest,
    read_table,
)

PATHS = sorted(TABLES.glob("*.csv"))


def test_each_table_has_its_reader() -> None:
    read = (
        skinny_tuning.TABLE,
        quantized_tuning.TABLE,
        quantized_tuning.HOPPER_TABLE,
        grouped_tuning.TABLE,
    )
    assert sorted(read) == PATHS


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_each_row_is_a_tuning_a_kernel_takes(path: Path) -> None:
    table = read_table(path)
    lines = path.read_text().splitlines()
    assert sum(map(len, table.values())) == len(lines) - 1, "two rows for one weight and class"
    kinds = get_args(get_type_hints(Tuning)["kind"])
    for measured, classes in table.items():
        assert list(classes) == sorted(classes), measured
        for tokens, tuning in classes.items():
            assert tokens & (tokens - 1) == 0, measured
            if tuning is None:
                assert path == skinny_tuning.TABLE, "others leave no row to torch"
                continue
            assert tuning.kind in kinds, measured
            assert tuning.tokens == tokens
            assert min(tuning[2:7]) >= 1, measured
            for power in (tuning.block_out, tuning.block_in, tuning.num_warps):
                assert power & (power - 1) == 0, measured
            assert tuning.splits == 1 or not measured.gated, measured
            if tuning.kind == "vector":
                assert tokens <= 4
                assert not tuning.descriptors
            if tuning.kind == "specialized":
                assert tuning.block_in == quantized_tuning.STEP_COLUMNS
                assert tuning.num_warps == tuning.block_out // GROUP_ROWS * 4


def test_every_format_has_the_classes_that_its_reader_asks_for() -> None:
    assert {tuple(classes) for classes in read_table(skinny_tuning.TABLE).values()} == {
        (1, 2, 4, 8, 16, 32, 64, skinny_tuning.MAX_TOKENS)
    }
    for classes in read_table(quantized_tuning.TABLE).values():
        assert [tuning.kind for tuning in classes.values() if tuning] == ["vector", "tile", "tile"]
    for path, weights in (
        (skinny_tuning.TABLE, {"dense"}),
        (quantized_tuning.TABLE, {"fp8", "fp8 in groups", "int4 in groups"}),
        (quantized_tuning.HOPPER_TABLE, {"fp8", "fp8 in groups"}),
        (grouped_tuning.TABLE, {"dense", "packed", "int4"}),
    ):
        of = {(measured.weight, measured.gated) for measured in read_table(path)}
        assert of == {(weight, gated) for weight in weights for gated in (True, False)}
    for classes in read_table(grouped_tuning.TABLE).values():
        assert [tokens for tokens in classes if tokens > 1] == [32, 64, grouped_tuning.TILES[-1]]


def test_a_size_that_was_not_measured_gets_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        ",".join(COLUMNS)
        + "\nfp8,0,1024,1024,1,vector,1,512,1,1,1,0\nfp8,0,1024,1024,16,torch,,,,,,"
        "\nfp8,1,1024,1024,16,tile,2,512,1,1,1,1\nfp8,0,4096,1024,16,tile,4,512,1,1,1,1"
        "\nint4,0,2048,1024,16,tile,8,512,1,1,1,1\n"
    )
    table = read_table(path)

    def found(tokens: int, out_size: int, *, gated: bool = False) -> int | None:
        case = Product(tokens, out_size, 1024, torch.bfloat16, gated)
        tuning = for_tokens(nearest(table, "fp8", case), tokens)
        return tuning and tuning.block_out

    assert found(1, 1024) == found(1, 1500) == 1
    assert found(2, 1500) is None, "torch's product"
    assert found(16, 1500, gated=True) == found(999, 1500, gated=True) == 2
    # A factor of four outweighs the gate. A nearer size of another format does not count.
    assert found(16, 3000) == found(16, 16384, gated=True) == 4


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("weight,tokens\ndense,1\n")
    with pytest.raises(ValueError, match=r"table\.csv: the columns are \['weight', 'tokens'\]"):
        read_table(path)

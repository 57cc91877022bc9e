"""The tables of tunings, as a sweep writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from parrot_bench.engine.studies.tuning_tables import update_table
from parrot_engine.kernels.tuning import TABLES, Measured, Tuning, read_table


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.csv")), ids=lambda path: path.stem)
def test_a_table_that_is_written_anew_is_the_same(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    update_table(copy, {})
    assert copy.read_bytes() == path.read_bytes()


def test_what_a_sweep_found_replaces_the_rows_of_the_same_weight_and_tokens(tmp_path: Path) -> None:
    copy = tmp_path / "dense.csv"
    copy.write_bytes((TABLES / "dense.csv").read_bytes())
    before = read_table(copy)
    known, new = next(iter(before)), Measured("dense", True, 512, 256)
    tile = Tuning("tile", 8, 32, 64, 4, 2, descriptors=True)
    update_table(copy, {known: {1: None, 2: tile}, new: {4: tile, 1: None}})
    after = read_table(copy)
    assert after[known] == before[known] | {1: None, 2: tile._replace(tokens=2)}
    assert list(after[new].items()) == [(1, None), (4, tile._replace(tokens=4))]
    assert [key for key in after if key != new] == list(before)
    assert all(after[key] == before[key] for key in before if key != known)

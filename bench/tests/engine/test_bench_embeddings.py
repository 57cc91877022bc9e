"""The measurement of an embedder, on a small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.pooling_checkpoints import write_model
from parrot_bench.engine import embeddings
from parrot_engine.models.loader import read_model_config
from parrot_engine.pooling.config import read_pooling


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, report = tmp_path / "bert", tmp_path / "report.json"
    folder.mkdir()
    write_model("bert", folder)
    options = ["--model", str(folder), "--device", "cpu", "--texts", "6", "--tokens", "9"]
    assert embeddings.main([*options, "--repetitions", "1", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "BertModel, cpu" in printed
    results = json.loads(report.read_text(encoding="utf-8"))["results"]
    assert [result["case"] for result in results] == ["one length", "all lengths"]
    assert results[0]["tokens"] == 54
    assert all(result["tokens_per_s"] > 0 for result in results)


def test_the_default_is_a_decoder_that_embeds(tmp_path: Path) -> None:
    embeddings.write_shape(tmp_path)
    pooling, shape = read_pooling(tmp_path), read_model_config(tmp_path)
    assert pooling is not None
    assert (pooling.task, pooling.mode, pooling.normalize) == ("embed", "lasttoken", True)
    products = 28 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072)
    assert 0.59e9 < products + shape.vocab_size * shape.hidden_size < 0.6e9


def test_a_model_without_vectors_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embeddings.main(["--model", str(tmp_path / "nothing")]) == 1
    assert "error:" in capsys.readouterr().err

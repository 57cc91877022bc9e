"""Writes a trained model as a Hugging Face checkpoint, with its model card.

The weights are rounded to bfloat16. Nothing here trains or scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from parrot_bench.demo_model.data import Book
from parrot_bench.demo_model.model import ModelShape
from parrot_bench.demo_model.tokenizer import CHAT_TEMPLATE, tokenizer_config

GENERATION = {
    "do_sample": True,
    "temperature": 0.8,
    "top_p": 0.95,
    "max_new_tokens": 512,
    "bos_token_id": 0,
    "eos_token_id": [1, 0],
    "pad_token_id": 0,
}


#: Files of sentence-transformers, by which the model has vectors too: a toy.
VECTORS: dict[str, object] = {
    "modules.json": [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ],
    "config_sentence_transformers.json": {
        "prompts": {},
        "default_prompt_name": None,
        "parrot": {"also_generates": True, "toy": True},
    },
}


class Sample(NamedTuple):
    """A text the model made; ``request`` of ``kind`` ``text`` is a prefix, of ``chat`` a turn."""

    kind: str
    request: str
    answer: str


def export(model: LlamaForCausalLM, shape: ModelShape, tokenizer: Tokenizer, folder: Path) -> int:
    """Write the checkpoint into `folder` (made if missing) and return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        # Tied to the embeddings.
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", shape.to_config())
    _write_json(folder / "generation_config.json", GENERATION)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(shape.max_position_embeddings))
    for name, value in VECTORS.items():
        _write_json(folder / name, value)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {
        "word_embedding_dimension": shape.hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    # One line: indented, the merges alone would take several times the room.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_card(
    folder: Path,
    *,
    shape: ModelShape,
    books: list[Book],
    report: dict[str, object],
    command: str,
    samples: list[Sample],
) -> None:
    """Writes the model card, ``README.md``, from what was measured in this very run."""
    figures = "\n".join(f"| {name} | {value} |" for name, value in report.items())
    table = "\n".join(f"| {b.id} | {b.title} | {b.author} |" for b in books)
    shown = "\n\n".join(_show(sample) for sample in samples)
    heads = f"{shape.num_attention_heads}, {shape.num_key_value_heads}, {shape.head_dim}"
    card = _CARD.format(
        heads=heads,
        shape=shape,
        figures=figures,
        books=table,
        samples=shown,
        command=command,
        count=len(books),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _show(sample: Sample) -> str:
    quoted = "\n".join(f"> {line}".rstrip() for line in sample.answer.strip().split("\n"))
    label = "Prompt" if sample.kind == "text" else "User"
    return f"{label}: `{sample.request}`\n\n{quoted}"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


_CARD = """\
---
license: cc0-1.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The demo model

A small Llama, trained from scratch on old story books, that goes on with English prose. It is here
so that the server has something real to run, on any machine and without a download. It is a
storyteller and nothing else.

## What it cannot do

- It knows no facts, does no sums, writes no code, translates nothing.
- It does not follow instructions and does not answer questions. It has learnt the *form* of a chat:
  a turn gets some prose in reply, which now and then takes up a word of the request and mostly ends
  within a few hundred tokens. System messages steer nothing, and tool calls are text to it.
- It reads and writes English prose only. Any other text passes through its tokenizer unharmed, but
  makes no sense to it.
- Most sentences read well one by one; what they tell does not hold together, people change their
  names and sexes, and it likes to repeat itself, the more so the lower the temperature.
- It takes over the manners, and the prejudices, of books of the nineteenth and early twentieth
  centuries, and may repeat short stretches of them word for word.
- Its vectors of texts, the mean of its last hidden states, are a toy: it was not trained to have
  any, and texts that mean the same need not be near each other.

## Architecture

`LlamaForCausalLM`, embeddings tied, weights stored in bfloat16 and run in float32. Byte-level BPE,
trained on the same books.

| | |
|---|---|
| Layers | {shape.num_hidden_layers} |
| Hidden, intermediate size | {shape.hidden_size}, {shape.intermediate_size} |
| Heads, key-value heads, head size | {heads} |
| Vocabulary | {shape.vocab_size} |
| Context | {shape.max_position_embeddings}; every training window had that length |
| RoPE theta | {shape.rope_theta:.0f} |

A chat turn is `<|role|>`, a line end, the text, `<|end|>`, a line end; roles are `system` (also for
`developer`), `user`, `assistant`, `tool`. Generation ends at `<|end|>` or `<|endoftext|>`.

## Training

| | |
|---|---|
{figures}

```
{command}
```

The data file holds JSON lines with `id`, `title`, `author` and `text`; a folder of text files does
as well.

Validation passages are runs of whole paragraphs of about 6,000 characters, taken from every book
by hash and never trained on; the loss is read from the start of each passage with no other context.
Quotation marks and dashes were made uniform first, and paragraphs with racial slurs left out. A
part of each batch holds conversations made from the training passages: "Continue: ..." with the
paragraphs that follow, "Write about ..." with words of the passage, "What happened next?" between
parts; only the answers count in their loss. The step with the lowest validation loss is kept, so
that the figures are a little flattering.

## Samples

Temperature 0.8, top-p 0.95, first try with a fixed seed, nothing picked by hand.

{samples}

## Data

{count} books, in the public domain in the United States, as transcribed by Project Gutenberg (the
number is the Gutenberg book number).

| Number | Title | Author |
|---|---|---|
{books}

## Licence

The books are in the public domain. No rights are claimed in the weights, the tokenizer and this
card: [CC0 1.0](https://creativecommons.org/publicdomain/zero/1.0/).
"""

"""Trains the demo model from scratch and exports it as a Hugging Face checkpoint.

    python -m parrot_bench.demo_model --data stories.jsonl.gz --out runs/demo

Needs torch and transformers. Minutes on a GPU; hours on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from parrot_bench.demo_model.corpus import Corpus
from parrot_bench.demo_model.data import read_books, split
from parrot_bench.demo_model.export import Sample, export, write_card
from parrot_bench.demo_model.model import ModelShape, sample
from parrot_bench.demo_model.tokenizer import END_OF_TEXT, END_OF_TURN, render_turn, train_tokenizer
from parrot_bench.demo_model.train import Score, Trainer, TrainSettings

_PROMPTS = (
    ("text", "Once upon a time there was"),
    ("text", "It was a cold evening in November when the stranger"),
    ("chat", "Tell me a story about a fox and a lantern."),
    ("chat", "Continue: The old house had been empty for years, until one night"),
)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and do the whole run."""
    args = _parser().parse_args(argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)

    began = time.monotonic()
    books = read_books(args.data)
    parts = split(books, fraction=args.validation, seed=0)
    tokenizer = train_tokenizer(("\n\n".join(b.paragraphs) for b in parts.train), args.vocab_size)
    given = {**vars(args), "vocab_size": tokenizer.get_vocab_size()}
    shape = ModelShape(**{each.name: given[each.name] for each in fields(ModelShape)})
    settings = TrainSettings(**{each.name: given[each.name] for each in fields(TrainSettings)})
    corpus = Corpus(
        parts,
        tokenizer,
        context=shape.max_position_embeddings,
        rows=settings.rows,
        chat_share=args.chat_share,
        chat_passes=args.chat_passes,
        seed=settings.seed,
        device=device,
    )
    trainer = Trainer(corpus, shape, settings, compile_model=args.compile)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{len(books)} books, {corpus.prose_tokens:,} training tokens, {parameters:,} parameters, "
        f"{trainer.total_steps} steps of {settings.rows} x {corpus.context} on {device}; "
        f"prepared in {time.monotonic() - began:.0f}s",
        flush=True,
    )
    trainer.run()

    # The score is that of the shipped weights, as the bfloat16 file will hold them.
    model = trainer.average.bfloat16().float()
    score = trainer.evaluate(model)
    samples = [_sample(model, tokenizer, shape, kind, request) for kind, request in _PROMPTS]
    report = _report(trainer, score, parameters, device)
    folder = args.out / "checkpoint"
    size = export(model, shape, tokenizer, folder)
    command = "python -m parrot_bench.demo_model " + shlex.join(
        _told(sys.argv[1:] if argv is None else argv)
    )
    write_card(folder, shape=shape, books=books, report=report, command=command, samples=samples)
    metrics = {
        **score._asdict(),
        "untrained_loss": trainer.untrained_loss,
        "parameters": parameters,
        "seconds": trainer.seconds,
        "steps": trainer.step,
        "best_step": trainer.best_step,
        "checkpoint_bytes": size,
        "history": trainer.history,
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    for item in samples:
        print(f"\n[{item.kind}] {item.request}\n{item.answer}")
    print(
        f"\nval {score.loss:.4f} nats/token, {score.bits_per_byte:.4f} bits/byte, "
        f"chat {score.chat_loss:.4f}; best of step {trainer.best_step}; "
        f"{trainer.seconds:.0f}s; {folder}: {size:,} bytes without the card"
    )


def _sample(
    model: LlamaForCausalLM, tokenizer: Tokenizer, shape: ModelShape, kind: str, request: str
) -> Sample:
    prompt = request if kind == "text" else render_turn("user", request) + "<|assistant|>\n"
    ids = tokenizer.encode(prompt).ids
    vocabulary = tokenizer.get_vocab()
    stop = [vocabulary[END_OF_TEXT], vocabulary[END_OF_TURN]]
    room = min(160, shape.max_position_embeddings)
    made = sample(model, ids, room, stop)
    answer = tokenizer.decode(ids + made if kind == "text" else made)
    return Sample(kind, request, answer + (" ..." if len(made) == room else ""))


def _report(
    trainer: Trainer, score: Score, parameters: int, device: torch.device
) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    corpus = trainer.corpus
    return {
        "Parameters": f"{parameters:,}",
        "Validation loss": f"{score.loss:.3f} nats per token (untrained: "
        f"{trainer.untrained_loss:.2f})",
        "Validation, bits per byte": f"{score.bits_per_byte:.3f}",
        "Validation loss of chat answers": f"{score.chat_loss:.3f} nats per token",
        "Training tokens": f"{corpus.prose_tokens:,} of prose, "
        f"{trainer.step / trainer.per_epoch:.1f} epochs",
        "Steps": f"{trainer.step} of {trainer.settings.rows} x {corpus.context} tokens, "
        f"best at {trainer.best_step}",
        "Time": f"{trainer.seconds:.0f} s on one {name}",
    }


def _told(argv: list[str]) -> list[str]:
    """The command line as given, folders reduced to their last part."""
    return [Path(item).name if "/" in item else item for item in argv]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of .txt, a text file or JSON lines (.gz)")
    add("--out", type=Path, required=True, help="folder for metrics and checkpoint/")
    add("--device", default="", help="cpu, cuda, cuda:1; default: cuda where there is one")
    add("--compile", action="store_true", help="compile the loss: a minute first, then faster")
    add("--validation", type=float, default=0.03, help="fraction of the passages held back")
    add("--chat-share", type=float, default=0.25, help="fraction of the rows for conversations")
    add("--chat-passes", type=int, default=6, help="conversations made from each passage")
    for kind in (TrainSettings, ModelShape):
        for each in fields(kind):
            option = "--" + each.name.replace("_", "-")
            add(option, type=type(each.default), default=each.default, help="(%(default)s)")
    return parser


if __name__ == "__main__":
    main()

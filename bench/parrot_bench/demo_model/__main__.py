"""Trains the demo model from scratch and exports it as a Hugging Face checkpoint.

    python -m parrot_bench.demo_model --data stories.jsonl.gz --out runs/demo

Needs torch, tokenizers, safetensors and numpy. Minutes on a GPU; hours on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from parrot_bench.demo_model.corpus import Corpus
from parrot_bench.demo_model.data import Book, read_books, split
from parrot_bench.demo_model.export import Sample, export, write_card
from parrot_bench.demo_model.model import ModelShape, StoryModel, sample
from parrot_bench.demo_model.tokenizer import END_OF_TEXT, END_OF_TURN, render_turn, train_tokenizer
from parrot_bench.demo_model.train import Score, Trainer, TrainSettings

_PROMPTS = (
    ("text", "Once upon a time there was"),
    ("text", "It was a cold evening in November when the stranger"),
    ("chat", "Tell me a story about a fox and a lantern."),
    ("chat", "Continue: The old house had been empty for years, until one night"),
)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and does the whole run."""
    args = _parser().parse_args(argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)

    began = time.monotonic()
    books = read_books(args.data)
    parts = split(books, fraction=args.validation, seed=0)
    tokenizer = _tokenizer(args, parts.train)
    shape = ModelShape(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.context,
    )
    corpus = Corpus(
        parts,
        tokenizer,
        context=args.context,
        rows=args.rows,
        chat_share=args.chat_share,
        chat_passes=args.chat_passes,
        seed=args.seed,
        device=device,
    )
    settings = TrainSettings(
        epochs=args.epochs,
        steps=args.steps,
        rows=args.rows,
        lr=args.lr,
        weight_decay=args.weight_decay,
        dropout=args.dropout,
        ema=args.ema,
        seed=args.seed,
        eval_every=args.eval_every,
        max_seconds=args.max_seconds,
    )
    trainer = Trainer(corpus, shape, settings, args.out, compile_model=args.compile)
    if args.resume:
        trainer.resume()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{len(books)} books, {corpus.prose_tokens:,} training tokens, {parameters:,} parameters, "
        f"{trainer.total_steps} steps of {args.rows} x {args.context} on {device}; "
        f"prepared in {time.monotonic() - began:.0f}s",
        flush=True,
    )
    trainer.run(stop_after=args.stop_after)

    model = _rounded(trainer.best_model())
    score = trainer.evaluate(model)
    samples = [_sample(model, tokenizer, kind, request) for kind, request in _PROMPTS]
    report = _report(trainer, score, parameters, device)
    folder = args.out / "checkpoint"
    size = export(model, tokenizer, folder)
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


def _tokenizer(args: argparse.Namespace, books: list[Book]) -> Tokenizer:
    path = args.tokenizer or (args.out / "tokenizer.json" if args.resume else None)
    if path is not None:
        return Tokenizer.from_file(str(path))
    texts = ("\n\n".join(book.paragraphs) for book in books)
    tokenizer = train_tokenizer(texts, args.vocab)
    tokenizer.save(str(args.out / "tokenizer.json"))
    return tokenizer


def _rounded(model: StoryModel) -> StoryModel:
    """The weights as the bfloat16 file will hold them: what is scored is what is shipped."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    return model


def _sample(model: StoryModel, tokenizer: Tokenizer, kind: str, request: str) -> Sample:
    prompt = request if kind == "text" else render_turn("user", request) + "<|assistant|>\n"
    ids = tokenizer.encode(prompt).ids
    stop = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)}
    room = min(160, model.shape.max_position_embeddings)
    made = sample(model, ids, new_tokens=room, stop=stop, temperature=0.8, top_p=0.95, seed=1)
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
    shape, settings = ModelShape(), TrainSettings()
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of .txt, a text file or JSON lines (.gz)")
    add("--out", type=Path, required=True, help="folder for state, metrics and checkpoint/")
    add("--device", default="", help="cpu, cuda, cuda:1; default: cuda where there is one")
    add("--resume", action="store_true", help="go on from the state in --out")
    add("--stop-after", type=int, default=0, help="pause after this many steps")
    add("--max-seconds", type=float, default=0.0, help="end training early after this time")
    add(
        "--compile", action="store_true", help="torch.compile the loss: a minute first, then faster"
    )
    add("--validation", type=float, default=0.03, help="fraction of the passages held back")
    add("--tokenizer", type=Path, help="a tokenizer.json to use instead of training one")
    add("--epochs", type=float, default=settings.epochs)
    add("--steps", type=int, default=0, help="instead of --epochs")
    add("--rows", type=int, default=settings.rows, help="windows per step")
    add(
        "--chat-share", type=float, default=0.25, help="fraction of the rows that are conversations"
    )
    add("--chat-passes", type=int, default=6, help="conversations made from each passage")
    add("--lr", type=float, default=settings.lr)
    add("--weight-decay", type=float, default=settings.weight_decay)
    add("--dropout", type=float, default=settings.dropout)
    add("--ema", type=float, default=settings.ema, help="decay of the average; 0: none")
    add("--seed", type=int, default=settings.seed)
    add("--eval-every", type=int, default=settings.eval_every, help="steps between validations")
    add("--vocab", type=int, default=shape.vocab_size)
    add("--context", type=int, default=shape.max_position_embeddings)
    add("--hidden", type=int, default=shape.hidden_size)
    add("--intermediate", type=int, default=shape.intermediate_size)
    add("--layers", type=int, default=shape.num_hidden_layers)
    add("--heads", type=int, default=shape.num_attention_heads)
    add("--kv-heads", type=int, default=shape.num_key_value_heads)
    add("--head-dim", type=int, default=shape.head_dim)
    return parser


if __name__ == "__main__":
    main()

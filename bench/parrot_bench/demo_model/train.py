"""The training loop: schedule, optimiser, moving average, validation.

A run takes minutes on a GPU. Nothing is random outside (seed, step).
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from parrot_bench.demo_model.corpus import IGNORE, Corpus, Held
from parrot_bench.demo_model.model import ModelShape, story_model


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything that decides the outcome, besides data and shape.

    The defaults are those of the shipped model. With 4 million tokens of text it is the data that
    runs out first: much weight decay over many epochs beat less of either.
    """

    epochs: float = 55.0
    steps: int = 0  # overrides epochs when positive
    rows: int = 16
    lr: float = 5e-3
    final_lr: float = 0.02  # fraction of lr
    warmup: float = 0.02  # fraction of the steps
    weight_decay: float = 1.4
    dropout: float = 0.12
    ema: float = 0.995
    seed: int = 0
    eval_every: int = 500


class Score(NamedTuple):
    """Held-out loss in nats per token; ``bits_per_byte`` for prose."""

    loss: float
    bits_per_byte: float
    chat_loss: float


class Trainer:
    """Trains one model on `corpus`."""

    def __init__(
        self,
        corpus: Corpus,
        shape: ModelShape,
        settings: TrainSettings,
        *,
        compile_model: bool = False,
    ) -> None:
        self.corpus, self.settings = corpus, settings
        device = corpus.device
        torch.manual_seed(settings.seed)
        self.model = story_model(shape, settings.dropout).to(device)
        self.average = story_model(shape).to(device).eval().requires_grad_(False)
        self.average.load_state_dict(self.model.state_dict())
        self._loss = torch.compile(self._batch_loss) if compile_model else self._batch_loss
        self._optimizer = _optimizer(self.model, settings)
        per_epoch = len(corpus.batches(0))
        self.per_epoch = per_epoch
        self.total_steps = settings.steps or max(1, round(settings.epochs * per_epoch))
        self.step = 0
        self.seconds = 0.0
        self.best: Score | None = None
        self.best_step = 0
        self._best_weights: dict[str, Tensor] = {}
        self.history: list[dict[str, float]] = []
        self.untrained_loss = self.evaluate(self.average).loss

    def run(self) -> None:
        """Train to the end, and take the best weights seen into `average`.

        Prints a line at each validation.
        """
        started = time.monotonic()
        losses: list[Tensor] = []
        per_step = self.corpus.context * (self.corpus.prose_rows + self.corpus.chat_rows)
        batches: list[tuple[Tensor, Tensor]] = []
        while self.step < self.total_steps:
            if self.step % self.per_epoch == 0:
                batches = self.corpus.batches(self.step // self.per_epoch)
            torch.manual_seed(self.settings.seed * 1_000_003 + self.step)
            losses.append(self._advance(*batches[self.step % self.per_epoch]))
            self.step += 1
            if self.step % self.settings.eval_every and self.step < self.total_steps:
                continue
            train_loss = float(torch.stack(losses).mean())
            losses.clear()
            score = self.evaluate(self.average)
            if self.best is None or score.loss < self.best.loss:
                self.best, self.best_step = score, self.step
                weights = self.average.state_dict().items()
                self._best_weights = {name: tensor.clone() for name, tensor in weights}
            self.seconds = time.monotonic() - started
            left = (self.total_steps - self.step) * self.seconds / self.step
            self.history.append({"step": self.step, "train": train_loss, **score._asdict()})
            print(
                f"step {self.step}/{self.total_steps} epoch {self.step / self.per_epoch:.1f} "
                f"train {train_loss:.4f} val {score.loss:.4f} bpb {score.bits_per_byte:.4f} "
                f"chat {score.chat_loss:.4f} | {self.step * per_step / self.seconds / 1e3:.0f}k "
                f"tok/s eta {left:.0f}s",
                flush=True,
            )
        self.average.load_state_dict(self._best_weights)

    @torch.no_grad()
    def evaluate(self, model: LlamaForCausalLM) -> Score:
        """Validation loss, each passage read from its own beginning."""
        loss, counted = self._held_loss(model, self.corpus.validation)
        chat, chat_counted = self._held_loss(model, self.corpus.chat_validation)
        bits = loss / math.log(2) / self.corpus.validation.text_bytes
        return Score(loss / counted, bits, chat / max(1, chat_counted))

    def _advance(self, starts: Tensor, chat: Tensor) -> Tensor:
        rate = self._rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = self.corpus.batch(starts, chat)
        self.model.train()
        with _autocast(self.corpus.device):
            loss: Tensor = self._loss(batch.ids, batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        decay = min(self.settings.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.model.parameters()), 1 - decay
            )
        return loss.detach()

    def _batch_loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(ids, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)

    def _rate(self) -> float:
        settings = self.settings
        warm = max(1, int(settings.warmup * self.total_steps))
        if self.step < warm:
            return settings.lr * (self.step + 1) / warm
        progress = (self.step - warm) / max(1, self.total_steps - warm)
        low = settings.final_lr
        return settings.lr * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)

    def _held_loss(self, model: LlamaForCausalLM, held: Held) -> tuple[float, int]:
        total = torch.zeros((), device=self.corpus.device, dtype=torch.float64)
        for ids, labels in zip(held.ids.split(8), held.labels.split(8), strict=True):
            with _autocast(self.corpus.device):
                logits = model(ids, use_cache=False).logits.float()
            flat = logits.flatten(0, 1)
            total += F.cross_entropy(
                flat, labels.flatten(), ignore_index=IGNORE, reduction="sum"
            ).double()
        return float(total), int((held.labels != IGNORE).sum())


def _optimizer(model: LlamaForCausalLM, settings: TrainSettings) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=model.device.type == "cuda",
    )


def _autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()

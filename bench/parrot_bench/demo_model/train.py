"""The training loop: schedule, optimiser, moving average, validation, checkpoints.

Checkpoints are safetensors and JSON, never pickles. Nothing is random outside (seed, step):
a resumed run sees the data, and nearly the dropout, of one that never stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from parrot_bench.demo_model.corpus import IGNORE, Corpus, Held
from parrot_bench.demo_model.model import ModelShape, StoryModel


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
    max_seconds: float = 0.0  # 0: no limit


class Score(NamedTuple):
    """Held-out loss in nats per token; ``bits_per_byte`` for prose."""

    loss: float
    bits_per_byte: float
    chat_loss: float


class Trainer:
    """Trains one model on `corpus`; `folder` receives checkpoints."""

    def __init__(
        self,
        corpus: Corpus,
        shape: ModelShape,
        settings: TrainSettings,
        folder: Path,
        *,
        compile_model: bool = False,
    ) -> None:
        self.corpus, self.settings, self.folder = corpus, settings, folder
        device = corpus.device
        torch.manual_seed(settings.seed)
        self.model = StoryModel(shape, settings.dropout).to(device)
        self.average = StoryModel(shape).to(device).eval().requires_grad_(False)
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
        self.history: list[dict[str, float]] = []
        self.untrained_loss = self.evaluate(self.average).loss

    def run(self, *, stop_after: int = 0) -> None:
        """Trains to the end (or `stop_after` steps more), keeping the best weights seen.

        Prints a line and saves at each validation. On a time limit the run ends early, without the
        rest of the learning rate schedule, and prints a line.
        """
        started, spent = time.monotonic(), self.seconds
        first = self.step
        losses: list[Tensor] = []
        per_step = self.corpus.context * (self.corpus.prose_rows + self.corpus.chat_rows)
        batches, epoch = self.corpus.batches(self.step // self.per_epoch), -1
        while self.step < self.total_steps:
            if epoch != self.step // self.per_epoch:
                epoch = self.step // self.per_epoch
                batches = self.corpus.batches(epoch)
            torch.manual_seed(self.settings.seed * 1_000_003 + self.step)
            losses.append(self._advance(*batches[self.step % self.per_epoch]))
            self.step += 1
            due = self.step % self.settings.eval_every == 0 or self.step == self.total_steps
            halt = stop_after and self.step - first >= stop_after
            if due or halt:
                train_loss = float(torch.stack(losses).mean())
                losses.clear()
                elapsed = time.monotonic() - started
                self.seconds = spent + elapsed
                score = self.evaluate(self.average)
                if self.best is None or score.loss < self.best.loss:
                    self.best, self.best_step = score, self.step
                    self._save_best()
                done = self.step - first
                rate = done * per_step / elapsed
                left = (self.total_steps - self.step) * elapsed / done
                self.history.append({"step": self.step, "train": train_loss, **score._asdict()})
                print(
                    f"step {self.step}/{self.total_steps} epoch {self.step / self.per_epoch:.1f} "
                    f"train {train_loss:.4f} val {score.loss:.4f} bpb {score.bits_per_byte:.4f} "
                    f"chat {score.chat_loss:.4f} | {rate / 1e3:.0f}k tok/s eta {left:.0f}s",
                    flush=True,
                )
                self.save()
                limit = self.settings.max_seconds
                if limit and self.seconds > limit:
                    print(f"stopped at the limit of {limit:.0f}s, at step {self.step}", flush=True)
                    break
            if halt:
                break

    def best_model(self) -> StoryModel:
        """The weights with the lowest validation loss so far (the average, where one is kept)."""
        self.average.load_state_dict(load_file(self.folder / "best.safetensors"))
        return self.average

    @torch.no_grad()
    def evaluate(self, model: StoryModel) -> Score:
        """Validation loss, each passage read from its own beginning."""
        loss, counted = self._held_loss(model, self.corpus.validation)
        chat, chat_counted = self._held_loss(model, self.corpus.chat_validation)
        bits = loss / math.log(2) / self.corpus.validation.text_bytes
        return Score(loss / counted, bits, chat / max(1, chat_counted))

    def save(self) -> None:
        """Writes all that `resume` needs."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        for index, entry in self._optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
        save_file(
            {k: v.contiguous() for k, v in tensors.items()}, self.folder / "state.safetensors"
        )
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "best_step": self.best_step,
            "history": self.history,
            "settings": asdict(self.settings),
        }
        (self.folder / "state.json").write_text(json.dumps(state))

    def resume(self) -> None:
        """Continues from what `save` wrote in the folder.

        Raises:
            FileNotFoundError: nothing was saved there.
            ValueError: it was saved by a run with other settings.
        """
        state = json.loads((self.folder / "state.json").read_text())
        mine = asdict(self.settings)
        free = ("max_seconds", "eval_every")
        changed = [k for k, v in mine.items() if k not in free and state["settings"].get(k) != v]
        if changed:
            raise ValueError(f"cannot resume: settings differ: {', '.join(changed)}")
        tensors = load_file(self.folder / "state.safetensors")
        self.model.load_state_dict(_part(tensors, "model."))
        self.average.load_state_dict(_part(tensors, "average."))
        entries: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _part(tensors, "optimizer.").items():
            index, key = name.split(".", 1)
            entries.setdefault(int(index), {})[key] = tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": entries})
        self.step, self.seconds = state["step"], state["seconds"]
        self.best = Score(*state["best"]) if state["best"] else None
        self.best_step, self.history = state["best_step"], state["history"]

    def _save_best(self) -> None:
        tensors = {k: v.contiguous() for k, v in self.average.state_dict().items()}
        save_file(tensors, self.folder / "best.safetensors")

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
        logits = self.model(ids).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)

    def _rate(self) -> float:
        settings = self.settings
        warm = max(1, int(settings.warmup * self.total_steps))
        if self.step < warm:
            return settings.lr * (self.step + 1) / warm
        progress = (self.step - warm) / max(1, self.total_steps - warm)
        low = settings.final_lr
        return settings.lr * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)

    def _held_loss(self, model: StoryModel, held: Held) -> tuple[float, int]:
        total = torch.zeros((), device=self.corpus.device, dtype=torch.float64)
        for ids, labels in zip(held.ids.split(8), held.labels.split(8), strict=True):
            with _autocast(self.corpus.device):
                logits = model(ids).float()
            flat = logits.flatten(0, 1)
            total += F.cross_entropy(
                flat, labels.flatten(), ignore_index=IGNORE, reduction="sum"
            ).double()
        return float(total), int((held.labels != IGNORE).sum())


def _optimizer(model: StoryModel, settings: TrainSettings) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=model.cos.device.type == "cuda",
    )


def _autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

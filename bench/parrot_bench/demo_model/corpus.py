"""Turns books and conversations into token windows on the training device.

An epoch goes once over the prose, cut at a random offset; half of its windows start at a
paragraph. Windows depend on (seed, epoch) alone, so a resumed run sees what it would have seen.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from parrot_bench.demo_model.chat import ChatWriter
from parrot_bench.demo_model.data import Book, Split
from parrot_bench.demo_model.tokenizer import END_OF_TEXT, END_OF_TURN

#: Label of a token that is read but not learnt (torch's default ``ignore_index``).
IGNORE = -100


class Batch(NamedTuple):
    """``[rows, context]`` each; a label is the token after its id, or `IGNORE`."""

    ids: Tensor
    labels: Tensor


class Held(NamedTuple):
    """Validation windows and the bytes of text that their counted tokens stand for."""

    ids: Tensor
    labels: Tensor
    text_bytes: int


class Corpus:
    """All tokens of a run, on `device`.

    Args:
        chat_passes: how many different conversations are made from each passage.
        chat_share: fraction of the rows of a batch that hold conversations.
    """

    def __init__(
        self,
        split: Split,
        tokenizer: Tokenizer,
        *,
        context: int,
        rows: int,
        chat_share: float,
        chat_passes: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.context, self.device, self._seed = context, device, seed
        self.chat_rows = min(rows - 1, max(1, round(rows * chat_share))) if chat_share else 0
        self.prose_rows = rows - self.chat_rows
        self._tokenizer = tokenizer
        number = tokenizer.get_vocab().__getitem__
        self._end, self._turn_end = number(END_OF_TEXT), number(END_OF_TURN)
        self._assistant = number("<|assistant|>")

        texts = [_text(book) for book in split.train]
        prose = self._encode(texts)
        stream = np.concatenate([np.append(ids, self._end) for ids in prose])
        self.prose_tokens = len(stream)
        self._starts = self._paragraph_starts(stream)
        self._prose = torch.from_numpy(stream).to(device)

        rng = random.Random(seed)
        writer = ChatWriter(split.train)
        chat = [text for _ in range(chat_passes) for text in writer.pass_over(rng)]
        self._chat_ids, self._chat_labels = self._pack(chat)
        self.validation = self._held_prose([_text(book) for book in split.validation])
        self.chat_validation = self._held_chat(split.validation, rng)

    def batches(self, epoch: int) -> list[tuple[Tensor, Tensor]]:
        """Per step of `epoch`: start offsets of the prose rows, and numbers of the chat rows."""
        rng = np.random.default_rng((self._seed, epoch))
        windows = max(1, (self.prose_tokens - self.context - 1) // self.context)
        steps = max(1, windows // self.prose_rows)
        starts = np.arange(windows) * self.context + rng.integers(self.context)
        snapped = self._starts[
            np.searchsorted(self._starts, starts, side="right").clip(1, len(self._starts)) - 1
        ]
        starts = np.where(rng.random(windows) < 0.5, snapped, starts)
        starts = starts.clip(0, max(0, self.prose_tokens - self.context - 1))
        prose = np.resize(rng.permutation(starts), (steps, self.prose_rows))
        chat = rng.integers(len(self._chat_ids), size=(steps, self.chat_rows))
        return list(zip(torch.from_numpy(prose), torch.from_numpy(chat), strict=True))

    def batch(self, starts: Tensor, chat: Tensor) -> Batch:
        """Gathers one batch on the device."""
        span = torch.arange(self.context + 1, device=self.device)
        index = (starts.to(self.device)[:, None] + span).clamp(max=self.prose_tokens - 1)
        rows = self._prose[index].long()
        chat = chat.to(self.device)
        ids = torch.cat((rows[:, :-1], self._chat_ids[chat].long()))
        labels = torch.cat((rows[:, 1:], self._chat_labels[chat].long()))
        return Batch(ids, labels)

    def _encode(self, texts: list[str]) -> list[NDArray[np.int32]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(item.ids, dtype=np.int32) for item in encoded]

    def _paragraph_starts(self, stream: NDArray[np.int32]) -> NDArray[np.int64]:
        ends = [
            number
            for token, number in self._tokenizer.get_vocab().items()
            if token.endswith("ĊĊ") or number == self._end
        ]
        found = np.flatnonzero(np.isin(stream, ends)) + 1
        return np.concatenate(([0], found[found < len(stream) - 1]))

    def _pack(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Windows that each begin with the first token of a conversation."""
        width = self.context + 1
        rows: list[NDArray[np.int32]] = []
        marks: list[NDArray[np.bool_]] = []
        row = np.full(width, self._end, dtype=np.int32)
        mark = np.zeros(width, dtype=np.bool_)
        used = 0
        for ids in self._encode(texts):
            ids = np.append(ids, self._end)
            room = width - used
            row[used : used + len(ids)] = ids[:room]
            mark[used : used + len(ids)] = self._answers(ids)[:room]
            used += len(ids)
            if used >= width:
                rows.append(row)
                marks.append(mark)
                row = np.full(width, self._end, dtype=np.int32)
                mark = np.zeros(width, dtype=np.bool_)
                used = 0
        if not rows or used > width // 2:
            rows.append(row)
            marks.append(mark)
        tokens, answers = np.stack(rows), np.stack(marks)
        labels = np.where(answers[:, 1:], tokens[:, 1:], IGNORE).astype(np.int32)
        return (
            torch.from_numpy(tokens[:, :-1].copy()).to(self.device),
            torch.from_numpy(labels).to(self.device),
        )

    def _answers(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """True for the tokens of the assistant's turns, their end mark included."""
        inside = np.zeros(len(ids), dtype=np.bool_)
        is_open = False
        for index, token in enumerate(ids.tolist()):
            inside[index] = is_open
            if token == self._assistant:
                is_open = True
            elif token == self._turn_end:
                is_open = False
        return inside

    def _held_prose(self, texts: list[str]) -> Held:
        ids, labels, counted = [], [], 0
        for text, tokens in zip(texts, self._encode(texts), strict=True):
            for start in range(0, len(tokens) - 1, self.context):
                piece = tokens[start : start + self.context + 1]
                ids.append(_fill(piece[:-1], self.context, self._end))
                labels.append(_fill(piece[1:], self.context, IGNORE))
            counted += len(text.encode()) - len(self._tokenizer.decode([int(tokens[0])]).encode())
        return self._held(ids, labels, counted)

    def _held_chat(self, books: list[Book], rng: random.Random) -> Held:
        ids, labels = [], []
        for tokens in self._encode(ChatWriter(books).pass_over(rng)):
            tokens = tokens[: self.context + 1]
            wanted = np.where(self._answers(tokens)[1:], tokens[1:], IGNORE)
            ids.append(_fill(tokens[:-1], self.context, self._end))
            labels.append(_fill(wanted, self.context, IGNORE))
        return self._held(ids[:128], labels[:128], 0)

    def _held(
        self, ids: list[NDArray[np.int32]], labels: list[NDArray[np.int32]], counted: int
    ) -> Held:
        windows, wanted = (torch.from_numpy(np.stack(part)).long() for part in (ids, labels))
        return Held(windows.to(self.device), wanted.to(self.device), counted)


def _text(book: Book) -> str:
    return "\n\n".join(book.paragraphs)


def _fill(values: NDArray[np.int32], length: int, filler: int) -> NDArray[np.int32]:
    filled = np.full(length, filler, dtype=np.int32)
    filled[: len(values)] = values
    return filled

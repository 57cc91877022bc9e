"""Figures of the Parrot paper's workloads and of recorded agents, with their sources.

Lengths are tokens.

How long a chunk is deserves a note. The artifact splits with LangChain's `CharacterTextSplitter`
on single spaces, whose length function encodes each word and each space alone, with a begin
token: it counts about 0.81 tokens a byte, 2.4 times what the text has. The recorded times show
it: chains with and without round trips differ by 65 round trips at a chunk of 1024, and 82 kB x
0.81 / 1024 is 65 chunks. So `paper_chunks` gives as many calls as were measured, each with some 420
tokens of text at "1024".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from random import Random
from typing import NamedTuple

# Summaries: figures 11 and 13, and beside chats 18

CHUNK_TOKENS = 1024
#: What each call of a summary generates.
SUMMARY_TOKENS = 50
#: Bytes of the paper that figure 18 summarises, as recorded with the artifact: 3 bytes a token
#: (LaTeX and formulas make many short tokens).
PAPER_BYTES = 87213

BYTES_PER_TOKEN = 3.0
#: What the artifact's splitter counts for a byte; see the module.
COUNTED_PER_BYTE = 0.81


def paper_chunks() -> list[int]:
    """Tokens of each chunk of that paper, split as the artifact does; the last is the rest."""
    tokens = round(PAPER_BYTES / BYTES_PER_TOKEN)
    per_chunk = round(CHUNK_TOKENS / COUNTED_PER_BYTE / BYTES_PER_TOKEN)
    full, rest = divmod(tokens, per_chunk)
    return [per_chunk] * full + ([rest] if rest else [])


# Chats: figure 18


def lognormal(random: Random, *, mean: float, median: float) -> float:
    """A draw from the log-normal distribution with this mean and median (mean > median)."""
    sigma = math.sqrt(2.0 * math.log(mean / median))
    return random.lognormvariate(math.log(median), sigma)


def chat_lengths(random: Random) -> tuple[int, int]:
    """Prompt and output tokens of the first turn of a chat.

    The paper samples ShareGPT, which is not shipped here. These are log-normal draws with the
    means that the vLLM paper (SOSP '23, figure 11) reports for it, 161 and 338 tokens; medians
    (60 and 220) are our choice, for the long tail that both have there. Filtered as the
    benchmark scripts filter: at least 4 tokens each, prompt up to 1024, both up to 2048.
    """
    while True:
        prompt = round(lognormal(random, mean=161.0, median=60.0))
        output = round(lognormal(random, mean=338.0, median=220.0))
        if prompt >= 4 and output >= 4 and prompt <= 1024 and prompt + output <= 2048:
            return prompt, output


#: Figure 18: chats, one a second, and summaries of the first paper.
MIXED_CHATS, MIXED_SUMMARIES = 40, 9
#: The first summary comes this much after the first chat; gaps between them, over and over.
SUMMARIES_AFTER_S = 15.0
SUMMARY_GAPS_S = (0.5, 0.5, 10.0)


# GPTs: figure 16


class Gpt(NamedTuple):
    """One of the applications: its name and lengths in tokens."""

    name: str
    system: int
    query: int
    output: int


GPTS = (
    Gpt("productivity", 7437, 7, 704),
    Gpt("image-generation", 1116, 8, 89),
    Gpt("programming", 1694, 4, 631),
    Gpt("data-analysis", 2031, 4, 416),
)


# Multi-agent coding: figure 17


class Round(NamedTuple):
    """One round: every agent has a prompt of the same length, most of it shared."""

    role: str
    prompt: int
    shared: int
    #: By file; an architect's call has one.
    outputs: tuple[int, ...]
    #: Llama tokens for each recorded token: the trace was counted with another tokenizer than the
    #: model's, and these are the artifact's own sums at 8 branches.
    llama: float


ARCHITECT = Round("architect", 182, 182, (706,), 1114 / 888)
CODERS = Round(
    "coder", 2991, 2991 * 12964 // 13339, (506, 822, 229, 447, 417, 196, 279, 444), 33654 / 27268
)
REVIEWERS = Round(
    "reviewer", 3717, 3717 * 15782 // 16019, (308, 331, 324, 278, 261, 238, 410, 394), 42237 / 32280
)
REVISERS = Round(
    "reviser", 4175, 4175 * 17824 // 18242, (511, 636, 254, 404, 424, 191, 172, 448), 47938 / 36440
)
#: Times that all files are reviewed and revised.
REVIEWS = 4


# Coding agents: 710 public traces (callanjfox/kv-cache-tester, 49,334 calls)

#: Seconds, and the share of gaps that are no longer. From the recorded hazards of return (.51 in
#: the first 10 s, .50 after 5 s, .34 after 10, .18 after 20, .14 after 30, .09 after 60, .07 after
#: 300) and quantiles (75 % at 34 s, 90 % at 171 s, 95 % at 472 s). The ends, 1 s and an hour, are
#: ours; in between the logarithm of the time is interpolated.
GAPS = (
    *((1.0, 0.0), (5.0, 0.20), (10.0, 0.51), (15.0, 0.60), (20.0, 0.677), (30.0, 0.74)),
    *((34.0, 0.75), (60.0, 0.81), (120.0, 0.87), (171.0, 0.90), (300.0, 0.927), (472.0, 0.95)),
    (3600.0, 1.0),
)
TURNS_MEAN, TURNS_MEDIAN, TURNS_MAX = 69.5, 45.5, 561
OUTPUT_MEAN, OUTPUT_MEDIAN = 440.0, 216.0
#: What tools give back in a turn; with the outputs it makes prompts as long as recorded.
RESULT_MEAN, RESULT_MEDIAN = 1800.0, 700.0
#: System prompt and tools, the same for all agents; then the task.
SYSTEM_TOKENS, TASK_TOKENS = 20_000, 1_000
#: At this length an agent goes on with a summary of this many tokens.
WINDOW_TOKENS, WINDOW_SUMMARY_TOKENS = 400_000, 8_000


def gap_s(random: Random) -> float:
    """A pause between two turns, in seconds."""
    share = random.random()
    high = bisect_right(GAPS, share, key=lambda point: point[1])
    (t0, f0), (t1, f1) = GAPS[high - 1], GAPS[min(high, len(GAPS) - 1)]
    if f1 == f0:
        return t1
    return math.exp(math.log(t0) + (math.log(t1) - math.log(t0)) * (share - f0) / (f1 - f0))

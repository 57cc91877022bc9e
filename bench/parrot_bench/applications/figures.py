"""Figures of the Parrot paper's workloads and of recorded agents, with their sources.

Lengths are tokens. The engine's own study of figure 14 keeps quantiles of the same prompts.

How long a chunk is deserves a note. The artifact splits with LangChain's `CharacterTextSplitter`
on single spaces, whose length function encodes each word and each space alone, with a begin
token: it counts about 0.81 tokens a byte, 2.4 times what the text has. The recorded times show
it: chains with and without round trips differ by 65 round trips at a chunk of 1024, and 82 kB x
0.81 / 1024 is 65 chunks. So `splitter="artifact"` gives as many calls as were measured, each with
some 420 tokens of text at "1024"; `splitter="tokens"` takes the paper at its word.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from random import Random
from typing import Literal, NamedTuple, TypeAlias

# Summaries: figures 11 to 13, and beside chats 18

CHUNK_TOKENS = 1024
#: What each call of a summary generates.
SUMMARY_TOKENS = 50
#: Tokens of the prompts around the texts, counted at 4 characters a token: "Write an one-sentence
#: summary …:", "CONCISE SUMMARY:"; before, between and after the texts of the refining prompt;
#: of the prompt that makes one summary of all.
FIRST = (17, 6)
REFINE = (37, 28, 32)
REDUCE = (10, 25)

Splitter: TypeAlias = Literal["artifact", "tokens"]

#: Sizes in bytes of ten and of thirty arXiv papers of March 2023, as recorded with the artifact: 82
#: and 67 kB on average, more than 20,000 tokens each, which 3 bytes a token gives (LaTeX and
#: formulas make many short tokens). The first are of figures 11, 12a, 13 and 18.
PAPERS = (87213, 60955, 65106, 62586, 73282, 77893, 120001, 129707, 65819, 77441)
#: Figure 12b.
MORE_PAPERS = (
    *(69902, 62586, 58539, 53042, 71045, 72883, 87407, 53231, 67912, 60955),
    *(64001, 55042, 57426, 65924, 73724, 69896, 60605, 65819, 70410, 59347),
    *(71314, 61916, 75908, 52351, 70677, 78259, 68965, 64885, 83694, 79844),
)

BYTES_PER_TOKEN = 3.0
#: What the artifact's splitter counts for a byte; see the module.
COUNTED_PER_BYTE = 0.81


def chunks(size: int, chunk: int, splitter: Splitter) -> list[int]:
    """Tokens of each chunk of a paper of `size` bytes, split at `chunk`; the last is the rest."""
    tokens = round(size / BYTES_PER_TOKEN)
    per_chunk = chunk if splitter == "tokens" else round(chunk / COUNTED_PER_BYTE / BYTES_PER_TOKEN)
    full, rest = divmod(tokens, per_chunk)
    return [per_chunk] * full + ([rest] if rest else [])


# Chats: figures 10 and 18


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


# Copilot: figures 14 and 15

COPILOT_SYSTEM_TOKENS = 5107
#: Recorded lengths of the prompts, system prompt included, as kept with the artifact.
COPILOT_PROMPTS = (
    *(6183, 6197, 6908, 6081, 5882, 5916, 5992, 6814, 6066, 6157, 6024, 6093, 6105, 6024, 6278),
    *(6015, 6334, 6018, 6169, 6296, 5941, 6089, 6009, 6032, 6074, 5923, 5859, 6139, 5959, 5915),
    *(6112, 6031, 6124, 6065, 6304, 6050, 6073, 5835, 6908, 6024, 7048, 5932, 5945, 6090, 5972),
    *(6163, 5973, 6158, 6404, 5857, 6364, 6203, 6150, 6036, 6694, 6038, 6414, 6000, 6154, 5999),
    *(6890, 7100, 6924, 6032, 5862, 6066, 5961, 6592, 6066, 6423, 6297, 6194, 6095, 6062, 5987),
    *(6439, 6810, 6043, 6096, 6107, 7311, 7381, 6293, 6276, 6416, 5262, 6213, 6109, 6289, 6412),
    *(6278, 6057, 6032, 6105, 5259, 6293, 5919, 6910, 5700, 5953, 6775, 5855, 5933, 5966, 6086),
    *(5985, 6129, 6401, 6076, 5953, 6180, 6350, 5598, 6028, 6228, 6400, 6239, 6396, 6050, 6378),
    *(5999, 6141, 6241, 6379, 6039, 6158, 6137, 6077, 6216, 6036, 6229, 6160, 5264, 6079, 5880),
    *(5972, 5966, 7083, 6178, 6734, 6394, 5861, 6081, 6687, 6183, 6049, 7004, 6071, 6247, 6962),
    *(6363, 6028, 5238, 5997, 6593, 6259, 6838, 6395, 6127, 6868, 6857, 6718, 6278, 6456, 7241),
    *(6300, 5240, 5950, 6283, 6169, 6097, 5224, 5972, 6627, 6822, 6153, 6652, 5908, 6039, 5271),
    *(7205, 6115, 6251, 6054, 6919, 6213, 6152, 6103, 5277, 6184, 6243, 6203, 7333, 5274, 6144),
    *(6244, 6163, 6073, 6150, 6298, 6327, 6101, 6136, 5906, 5265, 6221, 6261, 6110, 7127, 6132),
    *(5741, 5271, 6203, 6219, 6148, 6142, 6173, 6314, 6232, 6264, 7133, 6211, 6325, 5271, 6211),
    *(6131, 5952, 5258, 6250, 5276, 6158, 7361, 5279, 6726, 6749, 6188, 5300, 5769, 6153, 5294),
    *(6079, 6286, 5983, 6239, 6446, 5811, 7012, 6321, 6730, 5261, 6233, 6303, 6863, 6109, 7492),
    *(6448, 5990, 6104, 5270, 6192, 6028, 6358, 5289, 6344, 5310, 6164, 6217, 6254, 6203, 5281),
    *(6048, 7282, 5244, 6250, 5269, 6548, 5276, 5290, 6186, 5331, 5286, 6871, 6749, 5259, 5939),
    *(6827, 5278, 7159),
)
#: Figure 14: recorded output lengths, each with how many of the 64 prompts have it.
COPILOT_OUTPUTS = (
    *((183, 2), (191, 3), (192, 3), (192, 1), (195, 3), (196, 2), (209, 4), (212, 3), (232, 2)),
    *((232, 5), (248, 2), (251, 2), (256, 1), (269, 3), (303, 1), (313, 1), (351, 5), (360, 6)),
    *((393, 7), (619, 2), (800, 2), (800, 4)),
)


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

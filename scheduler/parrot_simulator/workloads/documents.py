"""The papers that the summaries of figures 11 to 13 and 18 read, by size.

Ten and thirty arXiv papers of March 2023, in bytes, as recorded with Parrot's artifact; 61 to 130
kB and 82 kB on average for the first sample, 67 kB for the second. Each has more than 20,000
tokens, which 3 bytes a token gives (LaTeX and formulas make many short tokens).

How long a chunk is deserves a note. The artifact splits with LangChain's `CharacterTextSplitter`
on single spaces, whose length function encodes each word and each space alone, with a begin
token: it counts about 0.81 tokens a byte, 2.4 times what the text has. The recorded times show
it: chains with and without round trips differ by 65 round trips at a chunk of 1024, and 82 kB x
0.81 / 1024 is 65 chunks. So `splitter="artifact"` gives as many calls as were measured, each with
some 420 tokens of text at "1024"; `splitter="tokens"` takes the paper at its word.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from parrot_simulator.workloads.base import WorkloadError

Splitter: TypeAlias = Literal["artifact", "tokens"]

#: Figures 11, 12a, 13 and 18.
PAPERS = (87213, 60955, 65106, 62586, 73282, 77893, 120001, 129707, 65819, 77441)
#: Figure 12b.
MORE_PAPERS = (
    *(69902, 62586, 58539, 53042, 71045, 72883, 87407, 53231, 67912, 60955),
    *(64001, 55042, 57426, 65924, 73724, 69896, 60605, 65819, 70410, 59347),
    *(71314, 61916, 75908, 52351, 70677, 78259, 68965, 64885, 83694, 79844),
)

BYTES_PER_TOKEN = 3.0
#: What the artifact's splitter counts for a byte; see above.
COUNTED_PER_BYTE = 0.81


def chunks(size: int, chunk: int, splitter: Splitter) -> list[int]:
    """Tokens of each chunk of a paper of `size` bytes, split at `chunk`; the last is the rest.

    Raises:
        WorkloadError: there is no such splitter.
    """
    if splitter not in ("artifact", "tokens"):
        raise WorkloadError(f"splitter must be 'artifact' or 'tokens', not {splitter!r}")
    tokens = round(size / BYTES_PER_TOKEN)
    per_chunk = chunk if splitter == "tokens" else round(chunk / COUNTED_PER_BYTE / BYTES_PER_TOKEN)
    full, rest = divmod(tokens, per_chunk)
    return [per_chunk] * full + ([rest] if rest else [])

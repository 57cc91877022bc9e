"""A small shape of attention, and policies that cut its keys in every way."""

from __future__ import annotations

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import MAX_SLOTS, Cuts, Policy, TileCuts

BLOCK, CHUNK, ALIGN = 4, 16, 8
SHAPE = AttentionShape(4, 2, 8, BLOCK)
POLICY = Policy(
    cuts=Cuts(CHUNK),
    fine_readings=6,
    align=ALIGN,
    narrow_rows=8,
    wide_rows=16,
    group=2,
    tile_tokens=8,
    tile_cuts=TileCuts((1,), least=BLOCK, start=1, merge=1),
    tile_round=6,
    tiles_alone=6,
    num_sms=12,
    num_kv_heads=2,
    max_slots=MAX_SLOTS,
    token_bytes=1,
    split_tokens=3,
    long_split_tokens=6,
    long_context=40,
    wide_min_rows=8,
    wide_min_bytes=60,
    wide_round=1000,
)
#: Where keys are cut, from a fixed way on to all that there is.
CUTS = (
    Cuts(CHUNK),
    Cuts(CHUNK, tail=ALIGN),
    Cuts(CHUNK, tail=CHUNK - 1),
    Cuts(CHUNK, tail=ALIGN, fine=(BLOCK * 2,)),
    Cuts(CHUNK, tail=ALIGN, coarse=2 * CHUNK),
)

"""A spread of small cases: every axis that a fault may need, on few tokens."""

from __future__ import annotations

import random

from harness.case import Case


def spread(count: int, seed: int = 1) -> list[Case]:
    """Make cases that vary every axis at once."""
    pick = random.Random(seed).choice
    edges = (0, 1, 2, 31, 32, 33, 64, 65, 97, 100, 128, 130, 200, 260)
    cases = [
        Case(
            heads=pick((1, 2, 12, 16, 20, 24, 32, 80)),
            query_tokens=pick((1, 1, 2, 3, 5, 8)),
            lengths=tuple(pick(edges) for _ in range(pick((1, 1, 2, 3, 5)))),
            page_size=pick((1, 1, 3, 16, 64)),
            cache_format=pick(("bf16", "e4m3fn", "e4m3fnuz", "fp16")),
            query_format=pick(("bf16", "bf16", "e4m3fn")),
            cache_scale=pick((1.0, 0.37, 2.0)),
            query_scale=pick((1.0, 1.7)),
            lse=pick((True, True, False)),
            table=pick(("padded", "ragged")),
            table_padding=pick((0, 3)),
            placement=pick(("identity", "permuted", "scattered", "shared", "high")),
            token_padding=pick((0, 8)),
            page_padding=pick((0, 64)),
            query_layout=pick(("split", "fused", "transposed")),
            content=pick(("gaussian", "decorrelated", "needle", "newest", "peak-tail", "rising", "falling", "slots", "edges")),
            amplitude=pick((1.0, 3.0, 20.0)),
            poison=pick(("nan", "nan", "large")),
            seed=index,
        )
        for index in range(count)
    ]
    # Rows past 2^31 and 2^32 bytes, page ids past 2^16 and 2^24.
    pools = ((70_000, 1, "bf16"), (4_000_000, 16, "bf16"), (4_000_000, 1, "e4m3fn"), (17_000_000, 1, "e4m3fn"))
    long = Case(heads=2, lengths=(300,), cache_format="e4m3fn", content="edges", page_size=64)  # three tiles a split
    return [*cases, long] + [
        Case(heads=3, lengths=(40, 70), page_size=size, cache_format=name, placement="high", pool_rows=rows)
        for rows, size, name in pools
    ]

"""Checkouts of AITER that tests make up: just enough of a package for what is tested.

Source: the layout of ROCm/aiter; the code in them is the tests' own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

GLUON = "aiter/ops/triton/gluon/mla_gluon.py"
MLA = "aiter/ops/triton/attention/mla.py"

#: A wrapper with the parameters of 0.1.18 and the assertions that its contract is read from.
WRAPPER = """
def mla_gluon(q_nope, q_pe, kv_c, o, page_table, seq_info, sm_scale, k_pe=None, kv_pe_offset=512, use_2d_view=True,
              kv_scale=1.0, min_kv_seq_len=1, return_lse=False, has_pe=True, attn_sink=None):
    batch_size, qlen, nhead, head_dim_ckv = q_nope.shape
    if nhead in (64, 128):
        REGIME = "bh64"
    elif 1 <= nhead <= 96:
        REGIME = "bh16bn64" if kv_c.dtype is None else "bh16bn128"
    NUM_KV_SPLITS = max(1, 256 // (batch_size * qlen))
    if REGIME == "bh64":
        assert batch_size % 64 == 0
    return o, None
"""


def make_checkout(root: Path, files: Mapping[str, str] | None = None) -> Path:
    """Write a checkout: a package ``aiter`` with the files given, and an ``__init__`` in every folder."""
    everything = {"aiter/__init__.py": "AITER_TRITON_ONLY = True\n", "aiter/ops/__init__.py": "", **(files or {})}
    for name, text in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        for folder in path.relative_to(root).parents:
            if folder.parts and not (root / folder / "__init__.py").exists():
                (root / folder / "__init__.py").write_text("", encoding="utf-8")
    return root

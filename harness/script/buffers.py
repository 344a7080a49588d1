"""The buffers of a case as lines of Python that make the same bytes.

1. A buffer of the script has the elements from the first to the last that the case's tensor reaches; the guard bands
   around it are left out.
2. What is not live is poison, as in the case.
"""

from __future__ import annotations

import base64
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.cache import place
from harness.content import PIECE, Aim
from harness.inputs import Inputs
from references.formats import FORMATS, as_integers

#: Columns of packed data.
_COLUMNS = 116
#: Characters of packed data beyond which the generator itself is packed instead: it takes about as many.
PACKED_CHARACTERS = 24_000
#: Families whose values ``RECIPE`` makes.
RECIPES = ("gaussian",)

RECIPE = '''\
def normal(name, part, *shape):
    """Nearly normal numbers, the same on every machine: sums of four uniform 16-bit integers from Philox."""
    key, counter = np.array([SEED, name], np.uint64), np.array([0, 0, 0, part], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(int(np.prod(shape)))
    total = words.view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int32) - 2 * 65535
    return torch.from_numpy(total.astype(np.float32) * np.float32(1 / np.sqrt(4 * (2**32 - 1) / 12))).reshape(shape)


def request_rows(b):
    pieces = [min({piece}, N - start) for N in [LENGTHS[b]] for start in range(0, N, {piece})]
    made = [normal(3, b * (1 << 32) + i, {piece}, D)[:count] for i, count in enumerate(pieces)]
    return torch.cat(made) if made else torch.zeros(0, D)


query = torch.stack([normal(2, b, S, H, D) for b in range(B)]) * np.float32({query!r})
query = query.to(QUERY_TYPE)
rows = [(request_rows(b) * np.float32({cache!r})).to(CACHE_TYPE) for b in range(B)]
'''

PACKED = """\
def unpack(text, dtype, *shape):
    data = np.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


query = unpack(QUERY, QUERY_TYPE, B, S, H, D)
rows = unpack(ROWS, CACHE_TYPE, sum(LENGTHS), D).split(LENGTHS)
"""

GENERATOR = '''\
from harness.case import Case
from harness.content import FAMILIES, PIECE, Aim, Request
from references.formats import FORMATS, encode


def generate():
    """Make the query and the rows of each request with the gate's own generator of this family of content."""
    case = Case.parse({case!r})
    make_query, make_rows = FAMILIES[case.content]
    queries, rows = [], []
    for b in range(B):
        slots = np.array([page * T + i for page in PAGES[b] for i in range(T)][:LENGTHS[b]], np.int64)
        request = Request(case=case, index=b, slots=slots, aim=Aim.at(case))
        queries.append(make_query(request))
        parts = [(start, min(start + PIECE, LENGTHS[b])) for start in range(0, LENGTHS[b], PIECE)]
        made = [make_rows(request, queries[b], start, stop) for start, stop in parts]
        rows.append(np.concatenate(made) if made else np.zeros((0, D), np.float32))
    def codes(values, name):
        return encode(torch.from_numpy(np.ascontiguousarray(values)), FORMATS[name], saturate=True)
    return codes(np.stack(queries), case.query_format), [codes(part, case.cache_format) for part in rows]


query, rows = generate()
'''

POOL = """\
# Bits, not values: copying floating-point codes may change a NaN.
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(tensor):
    return tensor.view(INTEGER[tensor.element_size()])


slots = [torch.tensor([page * T + i for page in pages for i in range(T)][:N], dtype=torch.int64)
         for pages, N in zip(PAGES, LENGTHS)]
pool = torch.zeros(POOL_ELEMENTS, dtype=CACHE_TYPE)
if POOL_ELEMENTS < 2**28:
    bits(pool).fill_(POISON)  # all that the kernel must not use
else:  # of a larger pool page 0, the pages in use and their neighbours: the rest stays mapped lazily
    near = {0} | {page + step for pages in PAGES for page in pages for step in (-1, 0, 1)}
    near = torch.tensor([page for page in sorted(near) if 0 <= page < POOL_PAGES])
    bits(pool).view(POOL_PAGES, PAGE_STRIDE).index_fill_(0, near, POISON)
cells = bits(pool).as_strided((POOL_PAGES, T, D), (PAGE_STRIDE, ROW_STRIDE, 1))
for b in reversed(range(B)):  # the first request owns the pages that others share with it
    cells[slots[b] // T, slots[b] % T] = bits(rows[b])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Source lines that make a case's buffers."""

    #: Constants: the case.
    constants: str
    #: Lines that make ``query``, [B, S, H, D], and ``rows``, a tensor [N, D] a request; CPU codes.
    data: str
    #: Lines that make ``pool`` and ``slots``.
    pool: str
    #: Modules of ours that the lines import.
    needs: tuple[str, ...] = ()


def describe(inputs: Inputs) -> Buffers:
    """Write the lines that make the buffers of a case."""
    constants = _constants(inputs)
    if inputs.case.content in RECIPES:
        aim = Aim.at(inputs.case)
        recipe = RECIPE.format(piece=PIECE, query=float(aim.query), cache=float(aim.cache))
        if gives(constants + recipe, inputs):
            return Buffers(constants=constants, data=recipe, pool=POOL)
    query = _pack("QUERY", _bytes(inputs.query))
    rows = _pack("ROWS", b"".join(_bytes(part) for part in _rows(inputs)))
    generator = GENERATOR.format(case=str(inputs.case))
    if len(query) + len(rows) > PACKED_CHARACTERS and gives(constants + generator, inputs):
        return Buffers(constants=constants, data=generator, pool=POOL, needs=("harness.content",))
    return Buffers(constants=constants, data=query + rows + PACKED, pool=POOL)


def gives(source: str, inputs: Inputs) -> bool:
    """Tell whether lines make the very query and rows of a case."""
    scope: dict[str, object] = {"torch": torch, "np": np, "zlib": zlib, "base64": base64}
    exec(source, scope)
    query, rows = scope["query"], scope["rows"]
    assert isinstance(query, Tensor) and isinstance(rows, Sequence)
    same = [_bytes(query) == _bytes(inputs.query)]
    same += [_bytes(mine) == _bytes(part) for mine, part in zip(rows, _rows(inputs), strict=True)]
    return all(same)


def poison_of(inputs: Inputs) -> int:
    """Find the integer of one poisoned element: what the cache holds where no request has a token."""
    flat, cells = as_integers(inputs.cache), inputs.cache.shape[:2]
    dead = torch.ones(cells[0] * cells[1], dtype=torch.bool)
    dead[inputs.slots.cpu()] = False
    found = torch.nonzero(dead)
    if not len(found):
        return int(torch.iinfo(flat.dtype).max if flat.dtype == torch.uint8 else -1)
    slot = int(found[0])
    return int(flat[slot // cells[1], slot % cells[1], 0])


def _constants(inputs: Inputs) -> str:
    case, cache = inputs.case, inputs.cache
    pages, row, page = cache.shape[0], cache.stride(1), cache.stride(0)
    tables = [_ids(table.tolist()) for table in place(case).tables]
    lines = [
        "# Requests, query tokens, heads, latent, rope, tokens a page.",
        f"B, S, H, L, R, T = {case.batch}, {case.query_tokens}, {case.heads}, {case.latent}, {case.rope}, {case.page_size}",
        "D = L + R",
        "# Cached tokens of each request, the S new ones counted in, and the ids of its pages.",
        f"LENGTHS = {list(case.lengths)}",
        f"PAGES = [{', '.join(tables)}]",
        f"SOFTMAX_SCALE, QUERY_SCALE, CACHE_SCALE = {case.softmax_scale!r}, {case.query_scale!r}, {case.cache_scale!r}",
        f"QUERY_TYPE, CACHE_TYPE = {FORMATS[case.query_format].storage}, {FORMATS[case.cache_format].storage}",
        f"SEED = {case.seed}",
        "# The pool of pages; strides in elements.",
        f"POOL_PAGES, PAGE_STRIDE, ROW_STRIDE = {pages}, {page}, {row}",
        f"POOL_ELEMENTS = {pages * page}",
        f"POISON = {poison_of(inputs)}",
    ]
    return "\n".join(_wrap(line) for line in lines) + "\n"


def _wrap(line: str) -> str:
    return "\n".join(textwrap.wrap(line, 120, break_long_words=False, subsequent_indent="    ")) if len(line) > 120 else line


def _ids(ids: Sequence[int]) -> str:
    if len(ids) > 4 and list(ids) == list(range(ids[0], ids[0] + len(ids))):
        return f"list(range({ids[0]}, {ids[0] + len(ids)}))"
    return str(list(ids))


def _rows(inputs: Inputs) -> Iterator[Tensor]:
    size = inputs.case.page_size
    for slots in torch.split(inputs.slots, list(inputs.case.lengths)):
        yield as_integers(inputs.cache)[slots // size, slots % size]


def _bytes(codes: Tensor) -> bytes:
    return as_integers(codes).contiguous().cpu().view(torch.uint8).numpy().tobytes() if codes.numel() else b""


def _pack(name: str, data: bytes) -> str:
    text = base64.b64encode(zlib.compress(data, 9)).decode()
    lines = "\n".join(textwrap.wrap(text, _COLUMNS))
    return f'{name} = """\n{lines}\n"""\n'

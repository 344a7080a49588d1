"""Faults of addressing: offsets that overflow, strides ignored, page geometry (kinds A, B and C)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.case import Case
from harness.faults.record import Fault
from harness.faults.scene import Act, Scene
from references.formats import FORMATS

Tensor = torch.Tensor


#: Placements that put live pages far from the pool's start.
_FAR = ("high", "scattered", "straddling")


def _row_bytes(case: Case) -> int:
    """Give the bytes from row to row of a page."""
    return (case.width + case.token_padding) * FORMATS[case.cache_format].storage.itemsize


def _span(case: Case) -> int:
    """Give the bytes that the pool spans at least."""
    rows = max(case.pool_rows, sum(case.lengths))
    return rows * _row_bytes(case) + rows // case.page_size * case.page_padding * _row_bytes(case) // case.width


def reaches(size: int) -> Callable[[Case], bool]:
    """Hold where the pool spans more than ``size`` bytes and rows lie near its end."""
    return lambda case: max(case.lengths) > 0 and _span(case) > size and case.placement in _FAR


def page_ids(count: int) -> Callable[[Case], bool]:
    """Hold where page ids reach ``count``."""
    return lambda case: (
        max(case.lengths) > 0
        and max(case.pool_rows, 4 * sum(case.lengths)) // case.page_size > count
        and case.placement in _FAR
    )


def wrapped_bytes(bits: int) -> Act:
    """Keep the low bits of the byte offset, as an unsigned product of that width does."""
    return lambda scene, offsets: offsets * scene.itemsize % (1 << bits) // scene.itemsize


def zero_past(limit: int) -> Act:
    """Read zeros past a byte offset, as a buffer load whose record count stops there."""

    def act(scene: Scene, offsets: Tensor) -> Tensor:
        scene.outside = "zero"
        return torch.where(offsets * scene.itemsize >= limit, torch.iinfo(torch.int64).min // 4, offsets)

    return act


def signed_bytes(scene: Scene, offsets: Tensor) -> Tensor:
    """Wrap the byte offset like a signed 32-bit product: it may become negative, and is then no address at all."""
    wrapped = (offsets * scene.itemsize + (1 << 31)) % (1 << 32) - (1 << 31)
    return torch.div(wrapped, scene.itemsize, rounding_mode="floor")


def signed_elements(scene: Scene, offsets: Tensor) -> Tensor:
    """Wrap the element offset like a signed 32-bit product."""
    scene.outside = "zero"
    return (offsets + (1 << 31)) % (1 << 32) - (1 << 31)


def low_bits(bits: int) -> Act:
    """Keep the low bits of the page id."""
    return lambda scene, pages: pages % (1 << bits)


def dense_pages(scene: Scene, _: Scene) -> Scene:
    """Take pages to follow each other without a gap."""
    scene.page_stride = scene.page_size * scene.token_stride
    return scene


def dense_rows(scene: Scene, _: Scene) -> Scene:
    """Take rows of a page to follow each other without a gap."""
    scene.token_stride = scene.inputs.case.width
    return scene


def _as_contiguous(tensor: Tensor) -> Tensor:
    """Read as many elements from the start of a view as it has, as if it had no gaps."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


def contiguous_query(scene: Scene, _: Scene) -> Scene:
    """Read both parts of the query as contiguous tensors."""
    nope, rope = _as_contiguous(scene.inputs.query_nope), _as_contiguous(scene.inputs.query_rope)
    scene.query = torch.cat([nope.float(), rope.float()], -1)
    return scene


def contiguous_rope(scene: Scene, _: Scene) -> Scene:
    """Read the rope part of the query with the strides of a contiguous tensor."""
    scene.query = torch.cat([scene.inputs.query_nope.float(), _as_contiguous(scene.inputs.query_rope).float()], -1)
    return scene


def swapped_query_strides(scene: Scene, _: Scene) -> Scene:
    """Take the stride of query tokens for that of heads and the other way round."""
    case = scene.inputs.case
    nope = scene.query[..., : case.latent].transpose(1, 2).reshape((*scene.query.shape[:3], case.latent))
    scene.query = torch.cat([nope, scene.query[..., case.latent :]], -1)
    return scene


def page_size_one(scene: Scene, _: Scene) -> Scene:
    """Take table entries for token slots: no page size in the kernel."""
    if scene.page_size > 1:
        scene.page_stride, scene.page_size = scene.token_stride, 1
        scene.outside = "zero"
    return scene


def shift_instead_of_divide(scene: Scene, within: Tensor) -> Tensor:
    """Find the offset in a page by the mask of the power of two above the page size, less one bit."""
    size = 1 << (scene.page_size.bit_length() - 1)
    return within % size


def within_limit(limit: int) -> Act:
    """Wrap the offset in a page at the largest page the kernel was written for."""
    return lambda scene, within: within % limit


def drop_last_page(scene: Scene, plan: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stop at the last whole page."""
    stop = scene.length // scene.page_size * scene.page_size
    return [(min(a, stop), min(b, stop)) for a, b in plan]


def last_page_by_remainder(scene: Scene, plan: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Take N mod T for the tokens of the last page, which is none where N is a whole number of pages."""
    whole = max(0, -(-scene.length // scene.page_size) - 1) * scene.page_size
    stop = whole + scene.length % scene.page_size
    return [(min(a, stop), min(b, stop)) for a, b in plan]


def whole_last_page(scene: Scene, plan: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Read the last page to its end, past the length."""
    stop = -(-scene.length // scene.page_size) * scene.page_size
    return [(a, stop if a < scene.length == b else b) for a, b in plan]


def see_what_was_read(scene: Scene, visible: Tensor) -> Tensor:
    """See the slots past the length for what the last query token sees."""
    return visible | (scene.live & (scene.tokens >= scene.length))


def drop_last_tile(scene: Scene, plan: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Round the number of tiles down."""
    tile = scene.variant.tile
    return [(a, a + (b - a) // tile * tile) for a, b in plan]


def last_token_at_tile_edge(scene: Scene, plan: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stop one early where the last token is the first of a tile."""
    tile = scene.variant.tile
    return [(a, b - 1 if (b - a) % tile == 1 else b) for a, b in plan]


def _several(case: Case) -> bool:
    return case.page_size > 1 and max(case.lengths) > 1


FAULTS = (
    Fault(name="offset-wraps-32", kind="A", report="ROCm/aiter #2768", what="byte offsets wrap at 2^32",
          needs="rows 4 GiB past the cache pointer", shows=reaches(1 << 32), acts={"offsets": wrapped_bytes(32)}),
    Fault(name="offset-past-4gib-zero", kind="A", report="ROCm/aiter #5765", what="rows past 4 GiB read as zero",
          needs="rows 4 GiB past the cache pointer", shows=reaches(1 << 32), acts={"offsets": zero_past(1 << 32)}),
    Fault(name="offset-past-2gib-zero", kind="A", report="ROCm/aiter #4774", what="rows past 2 GiB read as zero",
          needs="rows 2 GiB past the cache pointer", shows=reaches(1 << 31), acts={"offsets": zero_past(1 << 31)}),
    Fault(name="offset-signed-faults", kind="A", report="ROCm/aiter #4474", what="byte offsets are signed 32-bit and fault",
          needs="rows 2 GiB past the cache pointer", shows=reaches(1 << 31), acts={"offsets": signed_bytes}),
    Fault(name="page-product-wraps", kind="A", report="vllm-project/vllm #47671",
          what="page id x page stride wraps at 2^31 elements", needs="rows 2^31 elements past the cache pointer",
          shows=lambda case: reaches((1 << 31) * FORMATS[case.cache_format].storage.itemsize)(case),
          acts={"offsets": signed_elements}),
    Fault(name="page-id-16-bit", kind="A", report="ROCm/aiter #3211", what="page ids lose their high half",
          needs="page ids past 65535", shows=page_ids(1 << 16), acts={"pages": low_bits(16)}),
    Fault(name="page-id-24-bit", kind="A", report="ROCm/aiter #3062", what="page ids go through a 24-bit multiply",
          needs="page ids past 2^24", shows=page_ids(1 << 24), acts={"pages": low_bits(24)}),
    Fault(name="page-stride-assumed", kind="B", report="ROCm/aiter #3498; vllm-project/vllm #45111",
          what="pages are taken to follow each other without a gap", needs="page padding, and more than the first page",
          shows=lambda case: case.page_padding > 0 and max(case.lengths) > 0, acts={"arguments": dense_pages}),
    Fault(name="row-stride-assumed", kind="B", report="ROCm/aiter #4673",
          what="rows of a page are taken to follow each other without a gap", needs="token padding and page size > 1",
          shows=lambda case: case.token_padding > 0 and _several(case), acts={"arguments": dense_rows}),
    Fault(name="query-assumed-contiguous", kind="B", report="flashinfer-ai/flashinfer #1341",
          what="the query parts are read as contiguous", needs="a fused or transposed query",
          shows=lambda case: case.query_layout != "split" and case.heads * case.query_tokens * case.batch > 1,
          acts={"arguments": contiguous_query}),
    Fault(name="query-rope-assumed-contiguous", kind="B", report="flashinfer-ai/flashinfer #1341",
          what="the rope part of the query is read as contiguous", needs="a fused or transposed query",
          shows=lambda case: case.query_layout != "split" and case.heads * case.query_tokens * case.batch > 1,
          acts={"arguments": contiguous_rope}),
    Fault(name="query-strides-exchanged", kind="B", report="ROCm/aiter #3841",
          what="the query's token and head strides are exchanged", needs="two heads and two query tokens",
          shows=lambda case: case.heads > 1 and case.query_tokens > 1, acts={"arguments": swapped_query_strides}),
    Fault(name="page-size-ignored", kind="C", report="ROCm/aiter #2996", what="table entries are taken for token slots",
          needs="page size > 1", shows=lambda case: case.page_size > 1, acts={"arguments": page_size_one}),
    Fault(name="page-size-rounded-down", kind="C", report="vllm-project/vllm #47671 (page 480)",
          what="the offset in a page is cut to a power of two", needs="a page size that is none",
          shows=lambda case: case.page_size & (case.page_size - 1) != 0 and _several(case),
          acts={"within": shift_instead_of_divide}),
    Fault(name="page-size-above-32", kind="C", report="flashinfer-ai/flashinfer #4347",
          what="offsets in a page wrap at the largest page the kernel knows", needs="pages of more than 32 tokens in use",
          shows=lambda case: case.page_size > 32 and max(case.lengths) > 32, acts={"within": within_limit(32)}),
    Fault(name="last-page-dropped", kind="C", report="vllm-project/vllm #31282", what="a partial last page is not read",
          needs="a length that is no multiple of the page size",
          shows=lambda case: any(n % case.page_size for n in case.lengths), acts={"plan": drop_last_page}),
    Fault(name="last-page-by-remainder", kind="C", report="flashinfer-ai/flashinfer #810",
          what="a full last page counts as empty", needs="page size > 1 and a length that is a multiple of it",
          shows=lambda case: any(n and n % case.page_size == 0 for n in case.lengths),
          acts={"plan": last_page_by_remainder}),
    Fault(name="last-page-whole", kind="C", report="vllm-project/vllm #47305", what="the last page is read to its end",
          needs="a length that is no multiple of the page size",
          shows=lambda case: any(n % case.page_size for n in case.lengths),
          acts={"plan": whole_last_page, "visible": see_what_was_read}),
    Fault(name="last-tile-dropped", kind="C", report="ROCm/aiter #2319", what="a partial last tile is not read",
          needs="a split that is no whole number of tiles", shows=lambda case: any(n % 32 for n in case.lengths),
          acts={"plan": drop_last_tile}),
    Fault(name="tile-edge-token-dropped", kind="C", report="ROCm/aiter #2106",
          what="a token that would start a tile is not read if it is the last", needs="N one past a tile edge",
          shows=lambda case: any(n % 32 == 1 for n in case.lengths), acts={"plan": last_token_at_tile_edge}),
)  # fmt: skip

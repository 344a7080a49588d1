"""Faults of the block table and of what a request's own row means (kinds D and L)."""

from __future__ import annotations

import torch

from harness.case import Case
from harness.faults.record import Fault
from harness.faults.scene import Scene

Tensor = torch.Tensor


def units_doubled(scene: Scene, pages: Tensor) -> Tensor:
    """Turn a page id into a slot id before multiplying by the page stride."""
    scene.outside = "zero"
    return pages * scene.page_size


def neighbour_row(scene: Scene, _: Scene) -> Scene:
    """Use the next request's row of the table."""
    scene.table_starts = [*scene.table_starts[1:], scene.table_starts[0]]
    return scene


def first_row(scene: Scene, _: Scene) -> Scene:
    """Use the first request's row of the table for all."""
    scene.table_starts = [scene.table_starts[0]] * len(scene.table_starts)
    return scene


def table_ignored(scene: Scene, pages: Tensor) -> Tensor:
    """Take the pages of a request to follow its first one."""
    scene.outside = "zero"
    first = scene.entries[scene.table_starts[scene.source]]
    return first + torch.div(scene.memory["columns"], 1, rounding_mode="floor")


def note_columns(scene: Scene, columns: Tensor) -> Tensor:
    """Keep the columns for what acts on pages."""
    scene.memory["columns"] = columns
    return columns


def row_width_assumed(scene: Scene, _: Scene) -> Scene:
    """Take the table to be as wide as the longest request needs."""
    if scene.inputs.block_table is None:
        return scene
    width = max(1, -(-max(scene.lengths) // scene.page_size))
    scene.table_starts = [scene.table_starts[0] + b * width for b in range(len(scene.table_starts))]
    return scene


def read_ahead(scene: Scene, columns: Tensor) -> Tensor:
    """Read the entry after the one wanted in the last page: a prefetch that runs one page ahead."""
    scene.outside = "zero"
    last = -(-scene.length // scene.page_size) - 1
    return torch.where((columns == last) & (last > 0), columns + 1, columns)


def one_late(scene: Scene, columns: Tensor) -> Tensor:
    """Enter a request's list of pages one entry late."""
    scene.outside = "zero"
    return columns + 1


def chunk_edge(scene: Scene, columns: Tensor) -> Tensor:
    """Load the table in chunks of 64 entries and find the first of a chunk not yet loaded."""
    return torch.where((columns % 64 == 0) & (columns > 0), columns - 1, columns)


def two_pages_exchanged(scene: Scene, columns: Tensor) -> Tensor:
    """Read page 1 in place of page 0 and the other way round, each with its own liveness."""
    if scene.length < 2 * scene.page_size:
        return columns
    return torch.where(columns < 2, 1 - columns, columns)


def last_page_of_neighbour(scene: Scene, pages: Tensor) -> Tensor:
    """Find the last page overwritten by the first page of the next request: a stale entry of a recycled row."""
    columns, last = scene.memory["columns"], -(-scene.length // scene.page_size) - 1
    other = scene.entries[scene.table_starts[(scene.source + 1) % len(scene.table_starts)]]
    if len(scene.lengths) == 1 or scene.lengths[(scene.source + 1) % len(scene.lengths)] == 0:
        return pages
    return torch.where((columns == last) & (last > 0), other, pages)


def longest_length(scene: Scene, _: Scene) -> Scene:
    """Use the longest length for every request."""
    scene.outside = "zero"
    scene.lengths = [max(scene.lengths)] * len(scene.lengths)
    return scene


def first_length(scene: Scene, _: Scene) -> Scene:
    """Use the first request's length for every request, as far as its own pages go."""
    scene.lengths = [min(scene.lengths[0], n) for n in scene.lengths]
    return scene


def length_without_new(scene: Scene, _: Scene) -> Scene:
    """Take the length not to count the new tokens, as another engine's does: the newest are not read."""
    case = scene.inputs.case
    scene.lengths = [max(0, n - case.query_tokens) for n in scene.lengths]
    return scene


def length_with_one_more(scene: Scene, _: Scene) -> Scene:
    """Take the length not to count the newest token though it does: one dead slot is read."""
    scene.outside = "zero"
    scene.lengths = [n + 1 if n % scene.page_size else n for n in scene.lengths]
    return scene


def batch_order(scene: Scene, stored: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Write answers in the scheduler's order, longest first, not in the requests' order."""
    out, lse, written = stored
    order = sorted(range(len(scene.lengths)), key=lambda b: -scene.lengths[b])
    return out[order], lse[order], written


def rows_past_sixteen(scene: Scene, stored: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Leave requests past the planned batch of four unwritten."""
    out, lse, written = stored
    written[4:] = False
    return out, lse, written


def _two(case: Case) -> bool:
    return case.batch > 1 and max(case.lengths) > 0


def _ragged(case: Case) -> bool:
    return len(set(case.lengths)) > 1


def _pages(case: Case, count: int) -> bool:
    return max(case.lengths) > case.page_size * (count - 1)


FAULTS = (
    Fault(name="table-units-doubled", kind="D", report="ROCm/ATOM #857",
          what="page ids are multiplied by the page size twice", needs="page size > 1",
          shows=lambda case: case.page_size > 1 and _pages(case, 1), acts={"pages": units_doubled}),
    Fault(name="table-row-of-neighbour", kind="D", report="lightseekorg/tokenspeed #955",
          what="a neighbour's table row is used", needs="two requests", shows=_two, acts={"arguments": neighbour_row}),
    Fault(name="table-row-of-first", kind="D", report="lightseekorg/tokenspeed #955", what="the first table row serves all",
          needs="two requests", shows=_two, acts={"arguments": first_row}),
    Fault(name="table-ignored", kind="D", report="flashinfer-ai/flashinfer #1976", what="pages are taken to be consecutive",
          needs="permuted pages", shows=lambda case: _pages(case, 2) and case.placement != "identity",
          acts={"columns": note_columns, "pages": table_ignored}),
    Fault(name="table-width-assumed", kind="D", report="Dao-AILab/flash-attention #1328",
          what="the table is taken to have no spare columns", needs="two requests and a padded table with spare columns",
          shows=lambda case: _two(case) and case.table == "padded" and case.table_padding > 0,
          acts={"arguments": row_width_assumed}),
    Fault(name="table-read-ahead", kind="D", report="Dao-AILab/flash-attention #1328",
          what="the last page is taken from the next entry", needs="two pages", shows=lambda case: _pages(case, 2),
          acts={"columns": read_ahead}),
    Fault(name="table-one-late", kind="D", report="sgl-project/sglang #38746",
          what="the list of pages is entered one entry late", needs="any tokens", acts={"columns": one_late}),
    Fault(name="table-chunk-edge", kind="D", report="ROCm/aiter #3211 (load groups)",
          what="every 64th entry repeats the one before", needs="more than 64 pages", shows=lambda case: _pages(case, 65),
          acts={"columns": chunk_edge}),
    Fault(name="table-stale-last-page", kind="D", report="lightseekorg/tokenspeed #955",
          what="the last page is another request's", needs="two requests, two pages",
          shows=lambda case: _two(case) and _pages(case, 2),
          acts={"columns": note_columns, "pages": last_page_of_neighbour}),
    Fault(name="longest-length-for-all", kind="L", report="ROCm/aiter op_tests (varlen never shorter)",
          what="every request is read as far as the longest", needs="ragged lengths", shows=_ragged,
          acts={"arguments": longest_length}),
    Fault(name="first-length-for-all", kind="L", report="vllm-project/vllm #41016",
          what="every request is read as far as the first", needs="ragged lengths", shows=_ragged,
          acts={"arguments": first_length}),
    Fault(name="new-tokens-not-counted", kind="L", report="sgl-project/sglang #12295", what="the new tokens are not read",
          needs="any tokens", acts={"arguments": length_without_new}),
    Fault(name="length-one-too-long", kind="L", report="sgl-project/sglang #12295", what="one slot past the length is read",
          needs="a partial last page", shows=lambda case: any(n % case.page_size for n in case.lengths),
          acts={"arguments": length_with_one_more}),
    Fault(name="answers-in-schedule-order", kind="L", report="flashinfer-ai/flashinfer #868",
          what="answers are written longest request first", needs="ragged lengths that do not fall",
          shows=lambda case: list(case.lengths) != sorted(case.lengths, reverse=True), acts={"store": batch_order}),
    Fault(name="batch-past-plan", kind="L", report="flashinfer-ai/flashinfer #2801",
          what="requests past the planned batch are not written", needs="five requests", shows=lambda case: case.batch > 4,
          acts={"store": rows_past_sixteen}),
)  # fmt: skip

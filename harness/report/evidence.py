"""What a wrong answer looks like as numbers: grids for a report, small enough for a line of the ledger.

1. A cell holds the worst of what it stands for; where an axis is too long, a cell stands for several of its places.
2. An error is counted in units of what correct rounding does on average (ρ): about 1 is right, whatever the data.
3. A cell that passes a limit says so in itself; nothing depends on the scale of colours.
4. A cell with nothing to say is None: no row of it sees a token, or none of the tokens can be told apart.

Source: the limits are the regime's; shares of tokens are those of ``harness.tokens``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from harness.actual import flatten
from harness.backends.protocol import Backend, Output
from harness.case import Case
from harness.inputs import Inputs, make_inputs
from harness.measure import Ratios, Yardstick, errors, measure_actual, measure_truth, per_element
from harness.regimes import Regime
from harness.symptoms import TILE
from harness.tokens import arrived
from references.arithmetic import Arithmetic
from references.decode import mla_decode
from references.formats import FORMATS
from references.precision import full_precision

Tensor = torch.Tensor

#: Most cells along an axis.
MOST = 32
#: Tokens in a line of the token grid where pages hold one token each.
LINE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of numbers over two axes."""

    #: "error" (ρ), or "share" (of its weight that a token gave, 1 being right).
    what: str
    #: The case and what it is to the failure: "smallest" or "first".
    case: str
    role: str
    #: What is laid out, in words.
    title: str
    #: What the axes are, and what their places are called.
    rows: str
    columns: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    #: The numbers by row; None where there is nothing to say.
    values: tuple[tuple[float | None, ...], ...]
    #: Whether something in the cell passes a limit, by row.
    broken: tuple[tuple[bool, ...], ...]


def grids(case: Case, backend: Backend, regime: Regime, *, device: str, role: str) -> tuple[Grid, ...]:
    """Run a case and lay out where its answer is wrong.

    Args:
        case: the problem.
        backend: who answers.
        regime: the rules it is judged by.
        device: where it runs.
        role: what the case is to the failure.
    """

    def run(asked: Case) -> tuple[Inputs, Output]:
        inputs = make_inputs(asked, device=device, output_format=backend.capabilities.output_format)
        return inputs, backend.run(inputs)

    with torch.no_grad(), full_precision():
        inputs, output = run(case)
        actual = flatten(case, output, FORMATS[regime.arithmetic.output])
        problem = regime.understood(inputs.problem())
        yardstick = measure_truth(problem, mla_decode(problem), regime)
        found = _errors(case, yardstick, measure_actual(actual, yardstick), errors(actual, yardstick), role)
        return (*found, *_tokens(case, run, (inputs, output), regime.arithmetic, role))


def _errors(case: Case, yardstick: Yardstick, ratios: Ratios, wrong: tuple[Tensor, Tensor], role: str) -> list[Grid]:
    """Lay out ρ over heads and latent tiles, and over requests and query tokens."""
    batch, tokens, heads, latent = case.batch, case.query_tokens, case.heads, case.latent
    error, lost = wrong
    live = yardstick.live.reshape(batch, tokens, heads)
    tiles = -(-latent // TILE)
    pad = (0, tiles * TILE - latent)

    def by_tile(values: Tensor) -> Tensor:
        shaped = torch.nn.functional.pad(values, pad).reshape(batch, tokens, heads, tiles, TILE)
        return shaped.sum(-1)

    rho = (by_tile(error.square()) / by_tile(yardstick.variance).clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    rho = rho.masked_fill(~live[..., None], -torch.inf)
    gross = (~(per_element(yardstick, error) <= 1) | lost) & yardstick.live[..., None]
    far = by_tile(gross.double()) > 0
    rows = ratios.rho.reshape(live.shape).masked_fill(~live, -torch.inf)
    broken = (~(ratios.worst() <= 1) & yardstick.live).reshape(live.shape)
    return [
        _grid(
            ("error", str(case), role, "heads × latent tiles"),
            ("head", "latent tile"),
            (_names(heads), [f"{tile * TILE}–{min((tile + 1) * TILE, latent) - 1}" for tile in range(tiles)]),
            _highest(rho, (0, 1)),
            far.any(0).any(0),
        ),
        _grid(
            ("error", str(case), role, "requests × query tokens"),
            ("request", "query token"),
            (_names(batch), _names(tokens)),
            _highest(rows, (2,)),
            broken.any(2),
        ),
    ]


def _tokens(
    case: Case, run: Callable[[Case], tuple[Inputs, Output]], own: tuple[Inputs, Output], arithmetic: Arithmetic, role: str
) -> list[Grid]:
    """Lay out tokens of the first request that lost or doubled some, by page; from slot-coded content."""
    if case.content != "slots":
        case = case.replace(content="slots", amplitude=1.0)
        try:
            own = run(case)
        except Exception:  # a kernel that fails in another way on other content says nothing about its tokens
            return []
    inputs, output = own
    for request, shares in arrived(inputs, output.out.cpu(), arithmetic).items():
        off = (shares - 1).abs() > 0.5  # what harness.tokens calls missing and doubled
        if bool(off.any()):
            width = case.page_size if case.page_size > 1 else LINE
            count = -(-len(shares) // width)
            pad = (0, count * width - len(shares))
            laid = torch.nn.functional.pad(shares, pad, value=math.nan).reshape(count, width)
            marked = torch.nn.functional.pad(off, pad).reshape(count, width)
            first = [str(line) if case.page_size > 1 else str(line * width) for line in range(count)]
            paged = case.page_size > 1
            title = f"tokens of request {request} × {'its pages' if paged else 'places in order'}"
            axes = ("page", "token in it") if paged else ("from token", "and on")
            return [_grid(("share", str(case), role, title), axes, (first, _names(width)), laid, marked)]
    return []


def _grid(
    what: tuple[str, str, str, str],
    axes: tuple[str, str],
    names: tuple[Sequence[str], Sequence[str]],
    values: Tensor,
    broken: Tensor,
) -> Grid:
    """Make a grid of [rows, columns] values; of several in one cell the furthest from 1 is kept."""
    lines = [(_bin(len(names[axis])), names[axis]) for axis in (0, 1)]
    kept, marks = [], []
    for a, b in lines[0][0]:
        parts = [(values[a:b, c:d], broken[a:b, c:d]) for c, d in lines[1][0]]
        kept.append(tuple(_worst(part, what[0]) for part, _ in parts))
        marks.append(tuple(bool(hit.any()) for _, hit in parts))
    named = [tuple(_span(given[a:b]) for a, b in bins) for bins, given in lines]
    kind, case, role, title = what
    return Grid(
        what=kind, case=case, role=role, title=title, rows=axes[0], columns=axes[1],
        row_names=named[0], column_names=named[1], values=tuple(kept), broken=tuple(marks),
    )  # fmt: skip


def _worst(part: Tensor, what: str) -> float | None:
    """Take the value furthest from 1, as a report prints it; infinity where one is no number, None where there is none."""
    known = part[~part.isnan() & (part != -torch.inf)]
    if not len(known):
        return None
    furthest = float(known[known.clamp_min(torch.finfo(torch.float64).tiny).log().abs().argmax()])
    # Shares are solved for, and worth two places.
    return float(f"{furthest:.3g}") if what == "error" else round(furthest, 2) + 0.0


def _highest(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Take the largest along axes; what is no number is infinitely large."""
    return torch.where(values.isnan(), torch.inf, values).amax(axes)


def _bin(count: int) -> list[tuple[int, int]]:
    size = -(-count // MOST)
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}–{names[-1]}"


def _names(count: int) -> list[str]:
    return [str(place) for place in range(count)]

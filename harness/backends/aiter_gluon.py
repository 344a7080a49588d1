"""AITER's Gluon MLA decode, unmodified: on gfx950 natively, on a CPU by emulation.

Rules kept here:

1. Every argument goes by keyword; a signature that is not known is refused when the backend is made.
2. One token query goes as 3-D, several as 4-D; a transposed query goes as 4-D always, so that both forms are asked
   with one token.
3. A query of two tensors goes with the cache as two views (latent and rope); any other with the joint cache.
4. The kernel has page size 1: tables of pages are expanded to token rows, as engines do.
5. The kernel has no query scale; it is folded into the softmax scale, which is a Python float.
6. The promise of a shortest length is kept: it is the shortest length of the case.
7. Empty rows: with more than one split the kernel writes zeros and an lse of minus infinity; with one split it writes
   nothing for an empty request and NaN for a row before the first token. As the split count follows the batch, the
   backend promises neither.

Source: ``aiter/ops/triton/gluon/mla_gluon.py`` (``mla_decode_gluon.py`` before 0.1.18); ROCm/aiter #4474, #4480,
#4555, #4711.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.backends.aiter_contract import GluonContract, read_contract
from harness.backends.aiter_modules import AiterModules, modules_of
from harness.backends.aiter_source import AiterSource, find_source
from harness.backends.gfx950 import ARCHITECTURE
from harness.backends.protocol import Capabilities, NotInstalled, Output, Unsupported
from harness.backends.token_rows import flat_rows, padded_rows, ragged_rows
from harness.backends.workspaces import poisoned_workspaces
from harness.case import Case
from harness.inputs import Inputs

#: Modules that hold the wrapper, newest first; the function bears the module's name.
_PLACES = ("aiter.ops.triton.gluon.mla_gluon", "aiter.ops.triton.gluon.mla_decode_gluon")


def device_architecture(device: torch.device) -> str:
    """Name the architecture of a device as ROCm does; ``cuda`` for a device of another maker."""
    name = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
    return name.partition(":")[0] or "cuda"


class AiterGluon:
    """AITER's Gluon kernel of one source, behind the harness's protocol."""

    def __init__(self, name: str, source: AiterSource) -> None:
        """Find the wrapper and read its contract.

        Raises: NotInstalled, when the source lacks it or states an unknown contract.
        """
        self.name = name
        self.source = source
        modules = modules_of(source, answered=True)
        place = next((place for place in _PLACES if modules.has(place)), None)
        if place is None:
            raise NotInstalled(
                f"AITER {source.label} at {source.root} has no Gluon MLA decode: looked for "
                f"{' and '.join(str(modules.path_of(p)) for p in _PLACES)}. It came with release 0.1.14."
            )
        self._place = place
        self.contract: GluonContract = read_contract(self._wrapper(modules))
        self.capabilities = Capabilities(empty_rows="undefined", returns_lse=self.contract.returns_lse)

    def _wrapper(self, modules: AiterModules) -> Callable[..., Any]:
        function_name = self._place.rpartition(".")[2]
        function = getattr(modules.load(self._place), function_name, None)
        if function is None:
            raise NotInstalled(
                f"AITER {self.source.label}: {modules.path_of(self._place)} defines no {function_name}. "
                f"This version of mla-gate does not know where the kernel went."
            )
        return function  # type: ignore[no-any-return]

    @property
    def public(self) -> tuple[str, str]:
        """Name the wrapper: its module and itself."""
        return self._place, self._place.rpartition(".")[2]

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract of this version on a device, or None."""
        if device.type == "cuda" and device_architecture(device) != ARCHITECTURE:
            return f"runs on {ARCHITECTURE}, not {device_architecture(device)}; on a CPU it is emulated"
        return self.contract.why_not(case)

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """Lay out a case as the wrapper's keyword arguments."""
        case = inputs.case
        three = (case.query_tokens == 1 and case.query_layout != "transposed") or not self.contract.multi_token
        split = case.query_layout == "split"
        rows = flat_rows(inputs)
        given: dict[str, Any] = {
            "q_nope": inputs.query_nope[:, 0] if three else inputs.query_nope,
            "q_pe": inputs.query_rope[:, 0] if three else inputs.query_rope,
            "kv_c": rows[:, : case.latent] if split else rows,
            "k_pe": rows[:, case.latent :] if split else None,
            "kv_pe_offset": 0 if split else case.latent,
            "o": inputs.out[:, 0] if three else inputs.out,
            "use_2d_view": case.table == "padded",
            "sm_scale": case.softmax_scale * case.query_scale,
            "min_kv_seq_len": min(case.lengths),
        }
        if case.table == "padded":
            given |= {"page_table": padded_rows(inputs), "seq_info": inputs.lengths}
        else:
            ends, ids = ragged_rows(inputs)
            given |= {"page_table": ids, "seq_info": ends}
        if self.contract.has_scale:
            given["kv_scale"] = case.cache_scale
        if self.contract.returns_lse:
            given["return_lse"] = case.lse
        return given

    def launch(self, inputs: Inputs) -> None:
        """Call the wrapper as on gfx950, whatever device the tensors are on; for compiling."""
        modules = modules_of(self.source, answered=True)
        wrapper = self._wrapper(modules)
        with modules.entered():
            wrapper(**self.arguments(inputs))

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode.

        Raises: Unsupported, when the case lies outside the contract; SourceChanged, when the source changed on disk.
        """
        reason = self.why_not(inputs.case, inputs.device)
        if reason is not None:
            raise Unsupported(f"{self.name}: {reason}")
        emulated = inputs.device.type == "cpu"
        modules = modules_of(self.source, answered=emulated)
        wrapper = self._wrapper(modules)
        modules.check_unchanged()
        given = self.arguments(inputs)
        with modules.entered():
            if emulated:
                answer = _emulate(wrapper, given)
            else:
                with poisoned_workspaces():
                    answer = wrapper(**given)
        return self._output(inputs, given, answer)

    def _output(self, inputs: Inputs, given: dict[str, Any], answer: Any) -> Output:
        case = inputs.case
        lse: Tensor | None = None
        if case.lse and self.contract.returns_lse:
            if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Tensor)):
                raise RuntimeError(f"{self.name}: the wrapper was asked for the lse and returned {type(answer).__name__}")
            lse = answer[1].view(case.batch, case.query_tokens, case.heads)
        return Output(
            out=inputs.out,
            lse=lse,
            what_ran={
                "kernel": str(self.contract.regime_of(case)),
                "splits": self.contract.splits_of(case),
                "query": f"{given['q_nope'].dim()}-D",
                "cache": "joint" if given["k_pe"] is None else "split",
                "table": "2-D" if given["use_2d_view"] else "indptr",
                "pages": "as given" if case.page_size == 1 else f"{case.page_size} tokens, expanded to rows",
            },
        )


def _emulate(wrapper: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Run the wrapper at both extremes of what the GPU may do; a difference is a fault that names its line."""
    from harness.emulation import run_all_extremes

    answer, _ = run_all_extremes(lambda: wrapper(**given), target=ARCHITECTURE)
    return answer


def make(name: str, label: str | None = None) -> AiterGluon:
    """Make the backend for the version that a label names.

    Raises: NotInstalled, when AITER or its kernel is not there.
    """
    return AiterGluon(f"{name}@{label}" if label else name, find_source(label))

"""AITER's asm MLA decode, ``aiter.mla.mla_decode_fwd``, without metadata and persistent.

Rules kept here:

1. A cell without a kernel is refused before the call: the call would abort the process.
2. Every argument goes by keyword, checked against the version at hand.
3. Metadata are built by AITER's own calls, with the formats always stated: omitted ones mean bf16, and the plan then
   does not fit the kernel.
4. The answer is read from the tensor that was passed as ``o`` after the call: with folded heads and several tokens AITER
   gives it another storage.
5. The cache has one token a page; engines call it so, and larger pages are not established on gfx950.
6. One version of the compiled AITER a process: its operators register themselves globally.

Source: ``aiter/mla.py`` and ``aiter/ops/attention.py`` of AITER. None of this has run on hardware here; the tests run it
against a strict stand-in for the compiled entry points.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.backends.aiter_asm_cells import EIGHT_BITS, why_no_cell
from harness.backends.aiter_gluon import device_architecture
from harness.backends.aiter_source import AiterSource, find_source
from harness.backends.calling import Step, Written, keywords_for
from harness.backends.protocol import Capabilities, NotInstalled, Output, Unsupported
from harness.backends.token_rows import flat_rows, ragged_rows
from harness.backends.workspaces import poisoned_workspaces
from harness.case import Case
from harness.inputs import Inputs
from references.formats import FORMATS

#: Backend names and the mode of each.
MODES = {"aiter-asm-np": "plain", "aiter-asm-ps": "persistent"}
#: The metadata in the order in which their sizes come; the call that fills them takes the second and the third the other way
#: round.
_METADATA = (
    "work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map",
)  # fmt: skip
#: Their names as a script has them.
_NAMED = {name: Written(name) for name in _METADATA}
#: Batch from which AITER answers a persistent call of 16 bf16 heads and one token by its plain kernel.
_DOWNGRADE_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AsmLibrary:
    """The functions of one AITER that the backend calls."""

    #: ``aiter.mla.mla_decode_fwd``.
    decode: Callable[..., Any]
    #: ``aiter.get_mla_metadata_info_v1``: shapes and types of the metadata.
    metadata_info: Callable[..., Any]
    #: ``aiter.get_mla_metadata_v1``: fills them.
    metadata: Callable[..., Any]


def load_library(source: AiterSource) -> AsmLibrary:
    """Import the whole of AITER from a source, compiled parts included.

    Raises: NotInstalled, when it cannot be imported here or another version is already loaded.
    """
    loaded = sys.modules.get("aiter")
    if loaded is not None and Path(str(loaded.__file__)).resolve().parent != source.package:
        raise NotInstalled(
            f"aiter is already loaded from {loaded.__file__}; the compiled AITER of {source.root} cannot stand beside it. "
            f"Run the two versions in two runs."
        )
    path, modules, finders = list(sys.path), set(sys.modules), list(sys.meta_path)
    sys.path.insert(0, str(source.root))
    try:
        mla, package = importlib.import_module("aiter.mla"), importlib.import_module("aiter")
        library = AsmLibrary(
            decode=mla.mla_decode_fwd,
            metadata_info=package.get_mla_metadata_info_v1,
            metadata=package.get_mla_metadata_v1,
        )
    except Exception as error:
        # AITER puts modules of its own beside itself, and folders on the path, before it fails.
        for name in set(sys.modules) - modules:
            if name.partition(".")[0] == "aiter" or str(source.root) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        sys.path[:], sys.meta_path[:] = path, finders
        raise NotInstalled(
            f"the asm kernels need the whole of AITER with ROCm; importing aiter.mla from {source.root} failed "
            f"({type(error).__name__}: {error}). Run on a ROCm host with AITER installed."
        ) from error
    sys.path.remove(str(source.root))
    return library


class AiterAsm:
    """The asm decode in one mode, behind the harness's protocol."""

    def __init__(self, name: str, mode: str, library: AsmLibrary, architecture: Callable[[torch.device], str]) -> None:
        """Take the functions to call and how to ask a device for its architecture."""
        self.name = name
        self.mode = mode
        self.capabilities = Capabilities(empty_rows="undefined", devices=frozenset({"cuda"}))
        self._library = library
        self._architecture = architecture

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract on a device, or None."""
        return why_no_cell(case, arch=self._architecture(device), mode=self.mode)

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode.

        Raises: Unsupported, when the case lies outside the contract; NotInstalled, when the signature is unknown.
        """
        case = inputs.case
        reason = self.why_not(case, inputs.device)
        if reason is not None:
            raise Unsupported(f"{self.name}: {reason}")
        given = self._arguments(inputs, self._metadata(inputs) if self.mode == "persistent" else {})
        with poisoned_workspaces():
            _, lse = self._library.decode(**given)
        out: Tensor = given["o"]
        shape = (case.batch, case.query_tokens, case.heads)
        return Output(
            out=out.view(*shape, case.latent),
            lse=lse.view(shape) if case.lse else None,
            what_ran={"kernel": "mla_decode_fwd", "mode": self._path(case)},
        )

    def _path(self, case: Case) -> str:
        profile = (case.heads, case.query_tokens, case.query_format, case.cache_format)
        if self.mode == "persistent" and profile == (16, 1, "bf16", "bf16") and case.batch >= _DOWNGRADE_BATCH:
            return "persistent was asked; AITER takes the plain kernel for this batch"
        return self.mode

    @property
    def public(self) -> tuple[str, str]:
        """Name the function: its module and itself."""
        return "aiter.mla", "mla_decode_fwd"

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """Lay out a case as the function's keyword arguments; the metadata go by the names that ``preface`` gives them."""
        return self._arguments(inputs, _NAMED if self.mode == "persistent" else {})

    def preface(self, inputs: Inputs) -> tuple[Step, ...]:
        """List the calls that make the metadata."""
        if self.mode != "persistent":
            return ()
        filling = self._filling(inputs.case, self._arguments(inputs, _NAMED), _NAMED)
        return (
            Step(names="sizes", place=("aiter", "get_mla_metadata_info_v1"), given=self._sizes(inputs.case)),
            Step(names=", ".join(_METADATA), text="(torch.empty(shape, dtype=dtype, device=DEVICE) for shape, dtype in sizes)"),
            Step(place=("aiter", "get_mla_metadata_v1"), given=filling),
        )

    def _arguments(self, inputs: Inputs, metadata: Mapping[str, Any]) -> dict[str, Any]:
        case, device = inputs.case, inputs.device
        ends, ids = ragged_rows(inputs)
        steps = torch.arange(0, (case.batch + 1) * case.query_tokens, case.query_tokens)
        eight_bit_query = case.query_format in EIGHT_BITS.values()
        needed: dict[str, Any] = {
            "q": inputs.query.reshape(-1, case.heads, case.width).contiguous(),
            "kv_buffer": flat_rows(inputs).view(-1, 1, 1, case.width),
            "o": inputs.out.view(-1, case.heads, case.latent),
            "qo_indptr": steps.to(device, torch.int32),
            "kv_indptr": ends,
            "kv_indices": ids,
            "kv_last_page_lens": torch.ones(case.batch, dtype=torch.int32, device=device),
            "max_seqlen_q": case.query_tokens,
            # A bf16 query has no scale of its own; in the softmax scale it is the same number.
            "sm_scale": case.softmax_scale * (1.0 if eight_bit_query else case.query_scale),
        }
        if eight_bit_query:
            needed |= {"q_scale": inputs.query_scale, "kv_scale": inputs.cache_scale}
        elif case.cache_format in EIGHT_BITS.values():
            needed |= {"kv_scale": inputs.cache_scale}
        if case.lse:
            needed["return_lse"] = True
        return keywords_for(self._library.decode, {**needed, **metadata}, {"page_size": 1, "nhead_kv": 1, "causal": True})

    def _sizes(self, case: Case) -> dict[str, Any]:
        """Give the arguments of the call that tells the sizes of the metadata."""
        return keywords_for(
            self._library.metadata_info,
            {
                "batch_size": case.batch,
                "max_seqlen_qo": case.query_tokens,
                "num_head_qo": case.heads,
                "is_sparse": False,
                "q_dtype": FORMATS[case.query_format].storage,
                "kv_dtype": FORMATS[case.cache_format].storage,
            },
            {"fast_mode": True},
        )

    def _filling(self, case: Case, call: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
        """Give the arguments of the call that fills the metadata, which ``made`` holds by the kernel's names."""
        return keywords_for(
            self._library.metadata,
            {
                "seqlens_qo_indptr": call["qo_indptr"],
                "seqlens_kv_indptr": call["kv_indptr"],
                "kv_last_page_lens": call["kv_last_page_lens"],
                "num_heads_per_head_k": case.heads,
                "num_heads_k": 1,
                "is_causal": True,
                "work_metadata_ptrs": made["work_meta_data"],
                **{name: made[name] for name in _METADATA[1:]},
                "dtype_q": FORMATS[case.query_format].storage,
                "dtype_kv": FORMATS[case.cache_format].storage,
            },
            {
                "page_size": 1,
                "kv_granularity": 32 if case.heads == 64 and case.query_format != "bf16" else 16,
                "max_seqlen_qo": case.query_tokens,
                "uni_seqlen_qo": case.query_tokens,
                "fast_mode": True,
            },
        )

    def _metadata(self, inputs: Inputs) -> dict[str, Any]:
        made = {
            name: torch.empty(shape, dtype=dtype, device=inputs.device)
            for name, (shape, dtype) in zip(_METADATA, self._library.metadata_info(**self._sizes(inputs.case)), strict=True)
        }
        self._library.metadata(**self._filling(inputs.case, self._arguments(inputs, made), made))
        return made


def make(name: str, label: str | None = None) -> AiterAsm:
    """Make the backend for the version that a label names.

    Raises: NotInstalled, when AITER is not there or cannot run here.
    """
    library = load_library(find_source(label))
    return AiterAsm(f"{name}@{label}" if label else name, MODES[name], library, device_architecture)

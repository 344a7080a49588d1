"""The script of an AITER case calls AITER's own function: it can be run where AITER is, and shows the fault or none."""

from __future__ import annotations

import os
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")

from harness.backends import registry
from harness.backends.aiter_asm import AiterAsm, AsmLibrary
from harness.backends.aiter_gluon import AiterGluon
from harness.backends.aiter_modules import AiterModules, modules_of
from harness.backends.aiter_source import SOURCE_VARIABLE, named_sources, parse_source
from harness.backends.aiter_triton import AiterTriton, _interpreted
from harness.backends.aiter_triton_entries import ENTRY_POINTS
from harness.case import Case
from harness.emulation import emulate
from harness.inputs import make_inputs
from harness.regimes import load
from harness.script import write_script
from tests.aiter_checkout import GLUON, MLA, WRAPPER, make_checkout

needs_source = pytest.mark.skipif(
    not os.environ.get(SOURCE_VARIABLE), reason=f"needs a checkout of AITER: name one in {SOURCE_VARIABLE}"
)
#: A function that gives back what it was called with, in place of an answer.
RECORDING = "    raise RuntimeError(dict(locals()))\n"


def script_of(backend: Any, text: str) -> str:
    case = Case.parse(text)
    return write_script(case, backend, load().of(backend.name, case))


def status_of(text: str) -> int:
    """Run a script in this process; its exit status."""
    with pytest.raises(SystemExit) as left:
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize(
    "text",
    ["v1:H=3:S=1:N=5+6:end", "v1:H=2:S=2:N=5+6:layout=fused:table=ragged:T=4:end", "v1:H=2:S=1:N=9:layout=transposed:end"],
)
def test_a_gluon_script_passes_what_the_gate_passes(tmp_path: Path, text: str) -> None:
    # The body that the contract is read from stays, behind what records.
    wrapper = WRAPPER.replace("    batch_size, qlen", RECORDING + "    batch_size, qlen")
    backend = AiterGluon("aiter-gluon", parse_source(str(make_checkout(tmp_path, {GLUON: wrapper}))))
    _same_call(backend, text, modules_of(backend.source, answered=True))


def test_a_triton_script_passes_what_the_gate_passes(tmp_path: Path) -> None:
    entry = ENTRY_POINTS["aiter-triton-mla"]
    function = f"def mla_decode_fwd({', '.join(f'{name}=None' for name in entry.signatures[0])}):\n{RECORDING}"
    backend = AiterTriton("aiter-triton-mla", parse_source(str(make_checkout(tmp_path, {MLA: function}))), entry)
    _same_call(
        backend, "v1:H=2:S=2:N=20+3:T=16:c=e4m3fn:cscale=0.5:table=ragged:end", modules_of(backend.source, answered=True)
    )


def _same_call(backend: Any, text: str, modules: AiterModules) -> None:
    """Hold what a script passes to what the adaptor passes: the same names, and tensors of the same bits and strides."""
    with modules.entered(), pytest.raises(RuntimeError) as called:
        exec(compile(script_of(backend, text), "script.py", "exec"), {"__name__": "__main__"})
    passed = called.value.args[0]
    for name, expected in backend.arguments(make_inputs(Case.parse(text))).items():
        actual = passed[name]
        if not isinstance(expected, torch.Tensor):
            assert actual == expected, name
            continue
        assert (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride()), name
        if name in ("page_table", "block_tables"):  # what no request uses holds another absurd page
            expected = torch.where(actual == 2**31 - 1, actual, expected)
        if name not in ("o", "out"):
            assert torch.equal(_bits(actual), _bits(expected)), name


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def test_a_persistent_script_makes_its_metadata_by_aiters_own_calls() -> None:
    called: list[tuple[str, dict[str, Any]]] = []

    def info(batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True):  # type: ignore[no-untyped-def]
        called.append(("info", dict(locals())))
        return [((2,), torch.uint64), ((3,), torch.int32), ((4, 8), torch.int32), *[((5,), torch.int32)] * 3]

    def fill(seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, is_causal,
             work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map,
             page_size=1, kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, fast_mode=True, dtype_q=None,
             dtype_kv=None):  # type: ignore[no-untyped-def]  # fmt: skip
        called.append(("fill", dict(locals())))

    def decode(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size=1, nhead_kv=1,
               sm_scale=None, work_meta_data=None, work_indptr=None, work_info_set=None, reduce_indptr=None,
               reduce_final_map=None, reduce_partial_map=None, q_scale=None, kv_scale=None, return_lse=False,
               causal=True):  # type: ignore[no-untyped-def]  # fmt: skip
        called.append(("decode", dict(locals())))
        o.zero_()
        return None, torch.zeros(len(o), o.shape[1])

    backend = AiterAsm(
        "aiter-asm-ps", "persistent", AsmLibrary(decode=decode, metadata_info=info, metadata=fill), lambda _: "gfx950"
    )
    text = script_of(backend, "v1:H=16:S=1:N=40+9:q=e4m3fn:c=e4m3fn:cscale=0.5:end")
    package, module = types.ModuleType("aiter"), types.ModuleType("aiter.mla")
    package.get_mla_metadata_info_v1, package.get_mla_metadata_v1 = info, fill  # type: ignore[attr-defined]
    module.mla_decode_fwd = decode  # type: ignore[attr-defined]
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "aiter"}
    sys.modules.update({"aiter": package, "aiter.mla": module})
    try:
        assert status_of(text) == 1  # zeros are no answer
    finally:
        del sys.modules["aiter"], sys.modules["aiter.mla"]
        sys.modules.update(before)
    assert [name for name, _ in called] == ["info", "fill", "decode"]
    filled, given = called[1][1], called[2][1]
    assert filled["work_indptr"].shape == (3,) and filled["work_info_set"].shape == (4, 8)
    assert given["work_info_set"] is filled["work_info_set"] and given["work_meta_data"] is filled["work_metadata_ptrs"]
    assert (filled["dtype_q"], given["kv_scale"].tolist()) == (torch.float8_e4m3fn, [0.5])


@needs_source
@pytest.mark.parametrize(
    ("name", "text", "status"),
    [
        ("aiter-gluon", "v1:H=12:S=1:N=70+3:c=e4m3fn:cscale=0.5:end", 0),
        ("aiter-gluon", "v1:H=3:S=2:N=65:layout=fused:table=ragged:end", 0),
        ("aiter-gluon", "v1:H=1:S=1:N=1:place=high:pool=1864136:end", 1),
        ("aiter-triton-mla", "v1:H=2:S=2:N=16+32:T=16:end", 0),
        ("aiter-triton-mla", "v1:H=1:S=1:N=1:T=16:end", 1),
        ("aiter-triton-decode", "v1:H=1:S=1:N=123:end", 1),
        ("aiter-triton-grouped", "v1:H=2:S=1:N=40+9:c=e4m3fn:cscale=0.5:layout=fused:end", 0),
        ("aiter-triton-rope", "v1:H=2:S=2:N=40+9:table=ragged:end", 0),
    ],
)
def test_a_script_run_over_aiter_itself_shows_the_fault_or_none(name: str, text: str, status: int) -> None:
    label = named_sources()[0].label
    backend: Any = registry.make(f"{name}@{label}" if len(named_sources()) > 1 else name)
    modules = modules_of(backend.source, answered=True)
    made = script_of(backend, text)
    assert "import harness" not in made and "from harness" not in made
    with modules.entered():
        if name == "aiter-gluon":
            with emulate():
                assert status_of(made) == status
            return
        modules.load(backend.public[0])
        with nullcontext() if name == "aiter-triton-grouped" else backend._path(modules), _interpreted(modules):
            assert status_of(made) == status

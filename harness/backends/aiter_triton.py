"""AITER's Triton decode kernels, unmodified: natively on any Triton GPU, on a CPU through the mended interpreter.

Rules kept here:

1. One backend an entry point: ``aiter-triton-mla``, ``aiter-triton-decode``, ``aiter-triton-rope``; what each takes
   stands in ``aiter_triton_entries``. ``decode_attention_fwd`` has two paths, one a head on ROCm and one for heads in
   groups elsewhere: the second is ``aiter-triton-grouped``.
2. On a CPU the kernels are those that gfx950 would run, launch sizes included.
3. Kernels are replaced by their interpreted selves inside a context only, in the modules of one version only.
4. Empty rows are undefined: all three divide by a sum of zero, and one by a tile count of zero.
5. On a GPU that is not AMD's, launch options that its compiler does not know are left out; AITER passes them always.

Source: ``aiter/ops/triton/attention`` of AITER; Triton's interpreter, ``harness/emulation/interpreter.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from harness.backends.aiter_modules import AiterModules, modules_of
from harness.backends.aiter_source import AiterSource, find_source
from harness.backends.aiter_triton_entries import ENTRY_POINTS, EntryPoint
from harness.backends.protocol import Capabilities, NotInstalled, Output, Unsupported
from harness.backends.workspaces import poisoned_workspaces
from harness.case import Case
from harness.inputs import Inputs

#: Launch options that only Triton's AMD backend knows.
_FOREIGN_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
#: The rope kernel's configuration on a GPU that is not AMD's; AITER ships none for it.
_FOREIGN_ROPE = {
    "fwd_grouped_kernel_stage1_rope": {"BLOCK_N": 32, "BLOCK_H": 16, "num_warps": 4, "num_stages": 1},
    "fwd_kernel_stage2": {"num_stages": 2},
}
#: Fields that are constants of AITER's kernels, or decide which of their strides are multiples of 16.
_COMPILED = frozenset(
    {
        "query_format", "cache_format", "latent", "rope", "heads", "query_tokens", "page_size", "table", "table_padding",
        "token_padding", "page_padding", "query_layout", "lse",
    }
)  # fmt: skip


class AiterTriton:
    """One Triton entry point of one source, behind the harness's protocol."""

    def __init__(self, name: str, source: AiterSource, entry: EntryPoint) -> None:
        """Find the function and check its signature.

        Raises: NotInstalled, when the source lacks it or its parameters are unknown.
        """
        self.name = name
        self.source = source
        self.entry = entry
        self.capabilities = Capabilities(empty_rows="undefined", returns_lse=entry.returns_lse, compiled=_COMPILED)
        modules = modules_of(source, answered=True)
        place = next((place for place in entry.places if modules.has(place)), None)
        if place is None:
            raise NotInstalled(
                f"AITER {source.label} at {source.root} has no {entry.function}: looked for "
                f"{' and '.join(str(modules.path_of(p)) for p in entry.places)}. This version lacks it."
            )
        self._place = place
        self._check_signature(self._function(modules))

    def _function(self, modules: AiterModules) -> Callable[..., Any]:
        function = getattr(modules.load(self._place), self.entry.function, None)
        if function is None:
            raise NotInstalled(f"AITER {self.source.label}: {modules.path_of(self._place)} defines no {self.entry.function}")
        return function  # type: ignore[no-any-return]

    def _check_signature(self, function: Callable[..., Any]) -> None:
        found = tuple(inspect.signature(function).parameters)
        if found not in self.entry.signatures:
            nearest = min(self.entry.signatures, key=lambda known: len(set(known) ^ set(found)))
            more, less = set(found) - set(nearest), set(nearest) - set(found)
            raise NotInstalled(
                f"unknown signature of {self._place}.{self.entry.function} in AITER {self.source.label}: it has "
                f"{', '.join(sorted(more)) or 'nothing'} in addition to the nearest known release and lacks "
                f"{', '.join(sorted(less)) or 'nothing'}{'' if more or less else '; the order differs'}."
            )

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract, or None."""
        rocm = torch.version.hip is not None
        if device.type == "cuda" and self.entry.path and self.entry.path != ("rocm" if rocm else "other"):
            return f"AITER takes another path of {self.entry.function} on this device; this one is its {self.entry.path} path"
        reason = self.entry.why_not(case)
        if reason is None and device.type == "cuda" and not rocm:
            reason = self.entry.why_not_cuda(case)
        return reason

    @property
    def public(self) -> tuple[str, str]:
        """Name the function: its module and itself."""
        return self._place, self.entry.function

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """Lay out a case as the function's keyword arguments."""
        return self.entry.arguments(inputs)

    def _path(self, modules: AiterModules) -> AbstractContextManager[None]:
        return nullcontext() if self.entry.path == "other" else _rocm_path(modules)

    def launch(self, inputs: Inputs) -> None:
        """Call the entry point as on gfx950, whatever device the tensors are on; for compiling."""
        modules = modules_of(self.source, answered=True)
        function = self._function(modules)
        with modules.entered(), self._path(modules):
            function(**self.entry.arguments(inputs))

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode.

        Raises: Unsupported, when the case lies outside the contract; SourceChanged, when the source changed on disk;
        KernelFault, on a CPU, when a kernel leaves its memory or its integers.
        """
        reason = self.why_not(inputs.case, inputs.device)
        if reason is not None:
            raise Unsupported(f"{self.name}: {reason}")
        on_cpu = inputs.device.type == "cpu"
        modules = modules_of(self.source, answered=on_cpu)
        function = self._function(modules)
        modules.check_unchanged()
        given = self.entry.arguments(inputs)
        if not on_cpu and torch.version.hip is None and "config" in self.entry.signatures[0]:
            given["config"] = {name: dict(values) for name, values in _FOREIGN_ROPE.items()}
        with modules.entered(), poisoned_workspaces():
            if on_cpu:
                with self._path(modules), _interpreted(modules):
                    function(**given)
            else:
                with nullcontext() if torch.version.hip is not None else _without_foreign_options():
                    function(**given)
        return Output(
            out=inputs.out,
            lse=self.entry.lse(inputs, given),
            what_ran={
                "kernel": self.entry.function,
                **({"path": self.entry.path} if self.entry.path else {}),
                **({"splits": int(given["num_kv_splits"])} if "num_kv_splits" in given else {}),
                "mode": "interpreted" if on_cpu else "native",
            },
        )


@contextmanager
def _without_foreign_options() -> Iterator[None]:
    """Leave AMD's launch options out of every launch: Triton refuses them on other GPUs."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        kept = {name: value for name, value in keywords.items() if name not in _FOREIGN_OPTIONS or name in self.arg_names}
        return original(self, *arguments, **kept)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


@contextmanager
def _rocm_path(modules: AiterModules) -> Iterator[None]:
    """Let modules that ask whether torch is ROCm's choose the path that gfx950 takes."""
    changed = [module for module in modules.loaded() if getattr(module, "is_hip_", None) is False]
    for module in changed:
        module.is_hip_ = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in changed:
            module.is_hip_ = False  # type: ignore[attr-defined]


@contextmanager
def _interpreted(modules: AiterModules) -> Iterator[None]:
    """Replace the Triton functions of one version by their interpreted selves, under the mended interpreter."""
    from triton.runtime.jit import JITFunction

    from harness.emulation.interpreter import interpreted, mended

    replaced: list[tuple[Any, str, Any]] = []
    stand_ins: dict[int, Any] = {}
    for module in modules.loaded():
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and not value.is_gluon():
                replaced.append((module, name, value))
                setattr(module, name, stand_ins.setdefault(id(value), interpreted(value)))
    try:
        with mended():
            yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def make(name: str, label: str | None = None) -> AiterTriton:
    """Make the backend of an entry point for the version that a label names.

    Raises: NotInstalled, when AITER or the entry point is not there.
    """
    return AiterTriton(f"{name}@{label}" if label else name, find_source(label), ENTRY_POINTS[name])

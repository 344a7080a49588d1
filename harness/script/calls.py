"""The call of a kernel as lines of Python.

1. A backend that lays out a public function's keyword arguments (``arguments(inputs)``) is called through that function:
   each tensor is a view of the script's own buffers, with the very strides and offset.
2. Any other backend is ours: its adaptor and all it imports of ours come packed. A kernel that has a module of its own is
   written out, so that it can be read and mended in place.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import inspect
import json
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from harness.backends.protocol import Backend
from harness.inputs import Inputs

#: Backends whose kernel is written out: its file in the packed sources.
KERNELS: Mapping[str, str] = {
    "triton-splitkv": "harness/backends/triton_splitkv_kernel.py",
    "gluon-splitkv": "harness/backends/gluon_splitkv_kernel.py",
}
#: Buffers that the script has under the same name.
_BUFFERS = (
    "query_nope",
    "query_rope",
    "cache",
    "out",
    "lse",
    "lengths",
    "block_table",
    "kv_indptr",
    "kv_indices",
    "query_scale",
    "cache_scale",
)
#: Elements up to which a tensor that is none of them is written out.
_WRITTEN = 4096

SOURCES = """\
home = pathlib.Path(tempfile.mkdtemp(prefix="mla-gate-script-"))
sources = json.loads(zlib.decompress(base64.b64decode(SOURCES)))
{over}for name, text in sources.items():
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    (home / name).write_text(text, encoding="utf-8")
sys.path.insert(0, str(home))
"""

ADAPTOR = """\
def run():
    from harness.case import Case
    from {module} import make

    given = SimpleNamespace(
        case=Case.parse({case!r}), device=torch.device(DEVICE), query_nope=query_nope, query_rope=query_rope, query=query,
        cache=cache, block_table=block_table, kv_indptr=kv_indptr, kv_indices=kv_indices, lengths=lengths,
        query_scale=query_scale, cache_scale=cache_scale, out=out, lse=lse, slots=torch.cat(slots).to(DEVICE),
    )
    answer = make({stem!r}, {label!r}).run(given)
    return answer.out, answer.lse
"""

PUBLIC = """\
from {module} import {function}


def run():
    answer = {function}(
{arguments}
    )
    return out, {lse}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a kernel is called."""

    #: Lines that define ``run() -> (out, lse)``.
    lines: str
    #: Modules of ours that they import.
    needs: tuple[str, ...] = ()
    #: The kernel where it is written out: its file in the packed sources, and its text.
    kernel: tuple[str, str] | None = None


def call(backend: Backend, inputs: Inputs) -> Call:
    """Find how a backend's kernel is called on inputs."""
    lay_out = getattr(backend, "arguments", None)
    if lay_out is not None:
        return Call(lines=_public(backend, inputs, lay_out(inputs)))
    stem, _, label = backend.name.partition("!")[0].partition("@")
    module, file = type(backend).__module__, KERNELS.get(stem)
    lines = ADAPTOR.format(module=module, case=str(inputs.case), stem=stem, label=label or None)
    return Call(lines=lines, needs=(module,), kernel=(file, _kernel(backend, file)) if file else None)


def pack(needs: Iterable[str], kernel: tuple[str, str] | None) -> str:
    """Write the lines that bring modules of ours, and all that they import of ours, to where the script runs."""
    sources = dict(sources_of(needs))
    if not sources:
        return ""
    over = lines = ""
    if kernel is not None:
        sources.pop(kernel[0], None)
        over = f'sources["{kernel[0]}"] = KERNEL\n'
        lines = f"# The kernel.\nKERNEL = {_quoted(kernel[1])}\n\n"
    packed = textwrap.fill(base64.b64encode(zlib.compress(json.dumps(sources).encode(), 9)).decode(), 116)
    lines += f'# What the gate itself brings, packed: {len(sources)} files.\nSOURCES = """\n{packed}\n"""\n'
    return lines + SOURCES.format(over=over)


def _public(backend: Backend, inputs: Inputs, given: Mapping[str, Any]) -> str:
    function = getattr(backend, "public", None) or ("<module>", "<function>")
    lines = "\n".join(f"        {name}={_expression(value, inputs)}," for name, value in given.items())
    lse = "(answer[1] if isinstance(answer, tuple) else lse)" if inputs.case.lse else "None"
    return PUBLIC.format(module=function[0], function=function[1], arguments=lines, lse=lse)


def _expression(value: Any, inputs: Inputs) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    for name in _BUFFERS:
        own = getattr(inputs, name)
        if own is None or own.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
            continue
        if own.dtype == value.dtype and own.shape == value.shape and own.stride() == value.stride():
            return name
        offset = value.storage_offset() * value.element_size() - own.storage_offset() * own.element_size()
        start = f"{name}.storage_offset() + {offset // value.element_size()}" if offset else f"{name}.storage_offset()"
        typed = name if own.dtype == value.dtype else f"{name}.view({value.dtype})"
        return f"{typed}.as_strided({tuple(value.shape)}, {value.stride()}, {start})"
    if value.numel() <= _WRITTEN and not value.is_floating_point():
        return f"torch.tensor({value.tolist()}, dtype={value.dtype}, device=DEVICE)"
    if value.numel() == 1:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype}, device=DEVICE)"
    # What is left is working memory: it holds nothing yet.
    return f"torch.full({tuple(value.shape)}, float('nan'), dtype={value.dtype}, device=DEVICE)"


def _kernel(backend: Backend, file: str) -> str:
    """Read the source of the kernel in use, a changed one included."""
    for value in (getattr(backend, name, None) for name in vars(backend)):
        if isinstance(value, ModuleType):
            return inspect.getsource(value)
    return (Path(__file__).resolve().parents[2] / file).read_text(encoding="utf-8")


def _quoted(source: str) -> str:
    for mark in ("'''", '"""'):
        if mark not in source and "\\" not in source:
            return f"{mark}\\\n{source}{mark}"
    return repr(source)


def sources_of(modules: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Walk the sources of ours that modules need: file and text, packages included."""
    waiting, seen = list(modules), set[str]()
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        for package in (".".join(parts[: count + 1]) for count in range(len(parts))):
            if package in seen:
                continue
            seen.add(package)
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                continue
            text = Path(spec.origin).read_text(encoding="utf-8")
            yield package.replace(".", "/") + ("/__init__.py" if spec.submodule_search_locations else ".py"), text
            waiting += _ours(text)


def _ours(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.partition(".")[0] in ("harness", "references") and _is_module(name):
                yield name


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False

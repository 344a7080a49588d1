"""The call of a kernel as lines of Python.

1. A backend that lays out the keyword arguments (``arguments(inputs)``) of a public function (``public``: its module and
   name) is called through that function: each tensor is a view of the script's own buffers, with the very strides and
   offset. What must be called before it (``preface(inputs)``) is called so too.
2. Any other backend is ours: its adaptor and all it imports of ours come packed. A kernel that has a module of its own is
   written out, so that it can be read and mended in place.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import inspect
import json
import re
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from harness.backends.calling import Step, Written
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
#: The buffer of the answer, or a view of it.
_OUT = re.compile(r"out\b")
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
{imports}


def run():
{steps}    given_out = {out}
    answer = {function}(
{arguments}
    )
    return given_out, {lse}
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
    public = getattr(backend, "public", None)
    if public is not None:
        return Call(lines=_public(backend, inputs, public))
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


def _public(backend: Backend, inputs: Inputs, public: tuple[str, str]) -> str:
    adaptor: Any = backend
    given = {name: _expression(value, inputs) for name, value in adaptor.arguments(inputs).items()}
    # The answer is read from the very object that was passed: a kernel may give it other memory.
    name = next(name for name, text in given.items() if _OUT.match(text))
    out, given[name] = given[name], "given_out"
    steps = adaptor.preface(inputs) if hasattr(backend, "preface") else ()
    places = dict.fromkeys([*(step.place for step in steps if step.place), public])
    lse = "answer[1] if isinstance(answer, tuple) else lse"
    return PUBLIC.format(
        imports="\n".join(f"from {module} import {function}" for module, function in places),
        steps="".join(_step(step, inputs) for step in steps),
        out=out,
        function=public[1],
        arguments=_keywords(given),
        lse=lse if inputs.case.lse and backend.capabilities.returns_lse else "None",
    )


def _step(step: Step, inputs: Inputs) -> str:
    given = _keywords({name: _expression(value, inputs) for name, value in step.given.items()})
    act = f"{step.place[1]}(\n{given}\n    )" if step.place else step.text
    return f"    {step.names} = {act}\n" if step.names else f"    {act}\n"


def _keywords(given: Mapping[str, str]) -> str:
    return "\n".join(f"        {name}={text}," for name, text in given.items())


def _expression(value: Any, inputs: Inputs) -> str:
    if isinstance(value, Written):
        return str(value)
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
    if value.numel() == 1 or (value.numel() <= _WRITTEN and not value.is_floating_point()):
        return f"torch.tensor({value.tolist()}, dtype={value.dtype}, device=DEVICE)"
    if not value.is_floating_point():
        packed = base64.b64encode(zlib.compress(value.cpu().contiguous().numpy().tobytes(), 9)).decode()
        data = f"bytearray(zlib.decompress(base64.b64decode({packed!r})))"
        return f"torch.frombuffer({data}, dtype={value.dtype}).reshape({tuple(value.shape)}).to(DEVICE)"
    joined = inputs.query.reshape(-1)
    if value.dtype == joined.dtype and value.is_contiguous() and torch.equal(_bytes(value), _bytes(joined)):
        return f"query.reshape({tuple(value.shape)})"
    # What is left is working memory: it holds nothing yet.
    return f"torch.full({tuple(value.shape)}, float('nan'), dtype={value.dtype}, device=DEVICE)"


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


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

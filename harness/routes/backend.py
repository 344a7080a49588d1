"""A route composed with its kernels: a backend like any other.

Rules kept here:

1. ``route:NAME`` calls the kernels that the route names; one that cannot run here leaves its cases outside the contract,
   with the reason. ``route:NAME+BACKEND`` lets one backend stand in for all of them: it computes, and each kernel's own
   contract still decides what it would have said.
2. The contract is the engine's: what it accepts when it starts, it must answer. A kernel that refuses on the way, aborts,
   or raises is the route's failure.
3. The case is the engine's: its query is bf16 as the model made it. What the route does to it is part of what is judged.
4. ``route:NAME:KEY=VALUE,KEY=VALUE`` chooses settings.
5. ``@LABEL`` is the version of AITER that the kernels are taken from.

Source: the protocol, ``harness/backends/protocol.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from harness.backends import registry
from harness.backends.aiter_gluon import AiterGluon, device_architecture
from harness.backends.protocol import Backend, Capabilities, NotInstalled, Output, UnknownBackend, Unsupported
from harness.backends.token_rows import why_not_flat
from harness.case import Case
from harness.inputs import Inputs
from harness.routes.contracts import Contracts
from harness.routes.record import Route, find_route, read_routes
from harness.routes.steps import STEPS, Step
from harness.routes.way import Way, find_way

_CACHES = ("bf16", "e4m3fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A route over kernels."""

    #: Its name in the registry.
    name: str
    route: Route
    #: Kernel -> who computes, or why nobody can here.
    kernels: Mapping[str, Backend | NotInstalled]
    #: Chosen settings; the others have their defaults.
    settings: Mapping[str, str] = field(default_factory=dict)
    #: The steps; a test puts a broken one among them.
    steps: Mapping[str, Step] = field(default_factory=lambda: STEPS)
    capabilities: Capabilities = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(self.route.choose(self.settings)))
        able = [kernel.capabilities for kernel in self.kernels.values() if not isinstance(kernel, NotInstalled)]
        if not able:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.kernels.items())
            raise NotInstalled(f"none of the kernels of route {self.route.name} can run here, name one to stand in with "
                               f"route:{self.route.name}+BACKEND ({reasons})")  # fmt: skip
        capabilities = Capabilities(
            devices=frozenset[str]().union(*(one.devices for one in able)),
            compiled=frozenset[str]().union(*(one.compiled for one in able)),
            empty_rows="undefined",
            returns_lse=False,
        )
        object.__setattr__(self, "capabilities", capabilities)

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the engine's contract on a device, or None."""
        if case.query_format != "bf16" or case.cache_format not in _CACHES:
            return f"the engine has bf16 queries and caches in {' or '.join(_CACHES)}"
        if case.cache_format == "bf16" and case.cache_scale != 1.0:
            return f"the engine has no scale for a bf16 cache, and the case has {case.cache_scale}"
        if (case.latent, case.rope) != (512, 64):
            return f"the engine serves rows of 512 + 64, not {case.latent} + {case.rope}"
        if case.token_padding or why_not_flat(case) or (case.page_size == 1 and case.page_padding):
            return "the engine's cache has nothing between its rows, and the case has"
        if min(case.lengths) < case.query_tokens:
            return "requests with fewer cached than query tokens are a graph's padding, which no route is described for"
        refused = self.route.why_not(case)
        if refused is not None:
            return refused
        if device.type not in self.capabilities.devices:
            return f"runs on {' and '.join(sorted(self.capabilities.devices))}, not on {device}"
        if self._arch(device) not in self.route.arch:
            return f"the route is described for {' and '.join(self.route.arch)}, not for {self._arch(device)}"
        way = self.way(case, device)
        if way is None:
            return "the engine has no way for it"
        if way.ends_with is not None:
            return None  # no kernel runs, so none has to be here
        kernel = self.kernels[way.kernel]
        if isinstance(kernel, NotInstalled):
            return f"needs {way.kernel}, which cannot run here: {kernel}"
        reason = kernel.why_not(way.case, device)
        return None if reason is None else f"{kernel.name} computes and cannot: {reason}"

    def _arch(self, device: torch.device) -> str:
        """Name the architecture that kernels are asked for: AMD's own, and the route's where others stand in for it."""
        found = device_architecture(device) if device.type == "cuda" else ""
        return found if found.startswith("gfx") else self.route.arch[0]

    def way(self, case: Case, device: torch.device) -> Way | None:
        """Find the way of a case."""
        gluon = self.kernels.get("aiter-gluon")
        at_hand = gluon.contract if isinstance(gluon, AiterGluon) else None
        # What is reported of a release is not said of the kernel at hand: that one runs.
        release = "" if at_hand else self.route.aiter
        contracts = Contracts(arch=self._arch(device), release=release, gluon=at_hand)
        return find_way(self.route, case, contracts, self.settings)

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode as the engine does.

        Raises:
            Unsupported: if the case lies outside the engine's contract, or a kernel on the way refuses it.
            AssertionError, Aborted, KeyError: where the engine's call would end so.
        """
        reason = self.why_not(inputs.case, inputs.device)
        if reason is not None:
            raise Unsupported(f"{self.name}: {reason}")
        way = self.way(inputs.case, inputs.device)
        assert way is not None, "why_not has found a way"
        if way.ends_with is not None:
            raise way.ends_with.error()
        kernel = self.kernels[way.kernel]
        assert not isinstance(kernel, NotInstalled), "why_not refuses what cannot run"
        cases, inner = [], replace(inputs, case=inputs.case.replace(lse=False), lse=None)
        for call in way.steps:
            cases.append(inner.case)
            step = self.steps[call.name]
            inner = step.lay(inner, step.ask(inner.case, call.argument), call.argument)
        case = inner.case
        shape = (case.batch, case.query_tokens, case.heads, case.latent)
        given = torch.empty(shape, dtype=inputs.out.dtype, device=inputs.device)
        answer = kernel.run(replace(inner, out=given))
        out = answer.out
        for call, before in zip(reversed(way.steps), reversed(cases), strict=True):
            out = self.steps[call.name].back(out, before, call.argument)
        inputs.out.copy_(out)
        ran = {"path" if key == "kernel" else key: value for key, value in answer.what_ran.items()}
        steps = ", ".join(map(str, way.steps)) or "none"
        return Output(out=inputs.out, what_ran={"kernel": way.kernel, "computed by": kernel.name, "steps": steps, **ran})


def names() -> list[str]:
    """List the routes as backends."""
    return [f"route:{name}" for name in read_routes()]


def make(name: str, label: str | None = None) -> Routed:
    """Make ``route:NAME``, ``route:NAME:KEY=VALUE,…`` or either with ``+BACKEND``.

    Raises:
        UnknownBackend: if there is no such route, setting or backend.
        NotInstalled: if no kernel of it can run here.
    """
    rest, plus, stand_in = name.removeprefix("route:").partition("+")
    route_name, _, chosen = rest.partition(":")
    route = find_route(route_name)
    settings: dict[str, str] = {}
    for pair in filter(None, chosen.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UnknownBackend(f"{name}: a setting is KEY=VALUE, not {pair!r}")
        settings[key] = value
    version = f"@{label}" if label else ""
    if plus:
        computing = registry.make(f"{stand_in}{version}")
        return Routed(name=f"{name}{version}", route=route, kernels=dict.fromkeys(route.kernels, computing), settings=settings)
    kernels: dict[str, Backend | NotInstalled] = {}
    for kernel in route.kernels:
        try:
            kernels[kernel] = registry.make(f"{kernel}{version}")
        except NotInstalled as reason:
            kernels[kernel] = reason
    return Routed(name=f"{name}{version}", route=route, kernels=kernels, settings=settings)

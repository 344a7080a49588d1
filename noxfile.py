"""The project's commands: `nox --list`, `nox --usage gate`, `nox -s gate -- --profile nightly`.

1. A session sets itself up: a virtual environment of its own under `.nox/`, filled with pip, kept and used again.
   It is filled anew only when pyproject.toml, constraints.txt, this file or the interpreter has changed.
2. On a machine without a GPU, torch is installed alone and first, at the version of constraints.txt, so that no other
   package can bring a torch of its own choice.
3. Where the interpreter that runs nox has a ROCm or CUDA torch already (a gfx950 container), a session uses that
   torch, and with it the triton, aiter and numpy that were built for it. No torch and no triton is installed there.
   Nothing of that environment is changed: the session's own environment sees it, and holds only what is missing.
4. Everything after `--` goes to the tool that the session runs.
5. `nox --no-venv` runs a session in the current interpreter as it is and installs nothing.

Source: the set-up order follows from how pip resolves: the first torch it sees is the one that stays.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if sys.version_info < (3, 11):  # noqa: UP036 - nox may run in any python
    raise SystemExit(f"mla-gate needs Python 3.11 or newer, and nox runs in {sys.version.split()[0]}: use a newer python")

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "typecheck", "tests", "gate"]

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")["project"]

#: Distributions that belong to the accelerator: never installed beside a ROCm or CUDA torch.
BUILT_FOR_THE_DEVICE = frozenset({"torch", "triton"})

#: Run in an interpreter of interest: what is its torch, does it see a device, what else is there?
PROBE = """
import importlib.metadata, json, site, sys
try:
    import torch
    version = getattr(torch, "version", None)
    found = {"torch": torch.__version__, "hip": getattr(version, "hip", None), "cuda": getattr(version, "cuda", None),
             "device": bool(torch.cuda.is_available())}
except Exception as error:
    found = {"torch": None, "why": f"{type(error).__name__}: {error}"}
found["sites"] = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
found["distributions"] = {d.name: d.version for d in importlib.metadata.distributions() if d.name}
print("probe:" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What one interpreter has to offer."""

    #: Version of its torch; None where torch is missing or does not import.
    torch: str | None
    #: ROCm or CUDA release its torch was built for; None for a CPU build.
    accelerator: str | None
    #: Whether its torch sees a device now.
    device: bool
    #: Folders its packages are found in, in order.
    sites: tuple[str, ...]
    #: Version of every installed distribution, by canonical name.
    distributions: Mapping[str, str]


@functools.cache
def probe(python: str) -> Environment:
    """Ask an interpreter, in a process of its own, for its torch and what came with it."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False, timeout=300)
    line = next((line for line in done.stdout.splitlines() if line.startswith("probe:")), None)
    if line is None:  # a torch whose libraries are missing may take the process with it
        return Environment(torch=None, accelerator=None, device=False, sites=(), distributions={})
    found: dict[str, Any] = json.loads(line.removeprefix("probe:"))
    return Environment(
        torch=found["torch"],
        accelerator=found.get("hip") or found.get("cuda"),
        device=found.get("device", False),
        sites=tuple(site for site in found["sites"] if Path(site).is_dir()),
        distributions={canonicalize_name(name): version for name, version in found["distributions"].items()},
    )


def requirements(*extras: str) -> list[Requirement]:
    """List what pyproject.toml asks for, with the extras named."""
    listed = list(PROJECT["dependencies"])
    for extra in extras:
        listed += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in listed]


def held(environment: Environment, wanted: Sequence[Requirement]) -> list[str]:
    """Pin every distribution of an environment, but for the plain tools that a session may bring newer."""
    ours = {canonicalize_name(requirement.name) for requirement in wanted} - BUILT_FOR_THE_DEVICE - {"numpy"}
    pins = []
    for name, version in sorted(environment.distributions.items()):
        try:
            Version(version)
        except InvalidVersion:
            continue  # pip cannot read such a pin, and cannot replace such a distribution either
        if name not in ours:
            pins.append(f"{name}=={version}")
    return pins


def site_packages(session: nox.Session) -> Path:
    """Find the folder a session's own packages live in."""
    return next(Path(session.virtualenv.location).glob("lib/python*/site-packages"))


def borrow(session: nox.Session, environment: Environment) -> None:
    """Let a session see the packages of the interpreter that runs nox, after its own.

    `--system-site-packages` would show the packages of the base interpreter only; a container's torch often lives in
    a virtual environment, and its aiter in a source tree that a `.pth` file names. Both are reached this way.
    """
    lines = [f"import site; site.addsitedir({site!r})" for site in environment.sites]
    (site_packages(session) / "zz-borrowed.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def install(session: nox.Session, wanted: Sequence[Requirement]) -> None:
    """Fill a session's environment: torch alone and first, or everything but torch where the host's is used."""
    host = probe(sys.executable)
    if host.accelerator:
        session.log(f"using this environment's torch {host.torch} (built for {host.accelerator}): none is installed")
        borrow(session, host)
        pins = Path(session.create_tmp()) / "held.txt"
        pins.write_text("\n".join(held(host, wanted)) + "\n", encoding="utf-8")
        tools = [one for one in wanted if canonicalize_name(one.name) not in BUILT_FOR_THE_DEVICE]
        session.install("-c", str(pins), *map(str, tools))
        if any((site_packages(session) / name).exists() for name in BUILT_FOR_THE_DEVICE):
            found = f"a package brought its own torch or triton beside {host.torch}"
            session.error(f"{found}: remove {session.virtualenv.location} and find out which")
        return
    other = shutil.which("python3")
    if other and probe(other).accelerator:
        session.warn(f"{other} has a torch for {probe(other).accelerator}, and nox runs in {sys.executable}, which has not")
        session.warn(f"to gate that torch: {other} -m pip install nox && {other} -m nox -s {session.name}")
    for requirement in wanted:
        if requirement.name == "torch":
            session.install("-c", str(CONSTRAINTS), str(requirement))
    session.install("-c", str(CONSTRAINTS), *map(str, wanted))


def set_up(session: nox.Session, *extras: str, project: bool = True) -> dict[str, str]:
    """Make a session's environment ready; return the variables its tools need."""
    wanted = requirements(*extras)
    if session.venv_backend == "none":
        session.log("no environment of its own: this interpreter is used as it is")
        return variables(sys.executable)
    host = probe(sys.executable)
    state = [sys.version, host.torch, host.accelerator, host.sites, list(map(str, wanted))]
    state += [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "constraints.txt", "noxfile.py")]
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    stamp = Path(session.virtualenv.location) / "mla-gate.stamp"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != digest:
        install(session, wanted)
        session.install("--no-deps", "--editable", str(ROOT))
        stamp.write_text(digest, encoding="utf-8")
    return variables(str(Path(session.bin) / "python"))


def variables(python: str) -> dict[str, str]:
    """Choose Triton's interpreter where no device is seen. Triton reads this when it is imported: later is too late."""
    return {} if probe(python).device else {"TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "1")}


def names_a(session: nox.Session, folder: str) -> bool:
    """Tell whether the posargs choose files or tests themselves."""
    return any(argument.startswith(folder) for argument in session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """Gate the backends that can run here and print the verdict table.

    nox -s gate                                   every backend that can run here, at the default profile
    nox -s gate -- --profile nightly              smoke, gate or nightly: how many cases, how large
    nox -s gate -- --backend aiter-gluon          only this backend; may be given more than once
    nox -s gate -- --regime bh16bn128 --seed 7    only this regime; another seed
    nox -s gate -- --report-html report.html      its report as one HTML file, too
    nox -s gate -- --shard 2/4                    the second of four parts; mla-gate report puts them together
    nox -s gate -- --aiter-source OLD=base --aiter-source NEW=change --baseline base
                                                  base against change: the same cases on both, and what differs
    """
    env = set_up(session, "triton") | {"MLA_GATE_COMMAND": "nox -s mla-gate --"}
    chosen = [] if names_a(session, "cases") else ["cases"]
    # An environment of the caller's own may not have this project installed, and so not know its plugin.
    known = session.venv_backend != "none" or "mla-gate" in probe(sys.executable).distributions
    plugin = [] if known else ["-p", "harness.plugin"]
    session.run("python", "-m", "pytest", *plugin, *chosen, *session.posargs, env=env)


@nox.session(name="mla-gate", venv_backend="none")
def mla_gate(session: nox.Session) -> None:
    """Run the mla-gate command in the environment of `nox -s gate`.

    nox -s mla-gate -- --help
    nox -s mla-gate -- backends                   what can run here, and why the others cannot
    nox -s mla-gate -- replay repros/FILE.json    one case again, by its file or its id
    """
    command(session, *session.posargs)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Break a kernel on purpose, and watch it be found, shrunk, explained and replayed: in under a minute, after the set-up.

    nox -s demo
    nox -s demo -- --folder DIR                   where its files go
    """
    command(session, "demo", *session.posargs)


def command(session: nox.Session, *arguments: str) -> None:
    """Run the mla-gate command in the environment of `nox -s gate`, which is made where there is none."""
    made = ROOT / ".nox" / "gate" / "bin" / "python"
    here = probe(sys.executable).distributions
    if not made.exists() and any(canonicalize_name(one.name) not in here for one in requirements()):
        session.run(sys.executable, "-m", "nox", "--install-only", "-s", "gate", external=True)
    python = str(made) if made.exists() else sys.executable
    env = variables(python) | {"MLA_GATE_COMMAND": "nox -s mla-gate --"}
    session.run(python, "-m", "harness.cli", *arguments, env=env, external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Test the harness itself: its laws, its contracts and that every check can fail.

    nox -s tests                                  all of them, on every core
    nox -s tests -- tests/test_style.py -k names  some of them
    nox -s tests -- -n 0 --pdb                    in one process
    """
    set_up(session, "triton", "dev")
    # The emulator is tested on kernels as a compiler gets them: Triton's interpreter must not have wrapped them before.
    env = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": None}
    alone = {"-n", "--numprocesses", "--pdb", "-p"} & set(session.posargs)
    spread = [] if alone else ["-n", "auto"]
    session.run("python", "-m", "pytest", *spread, *session.posargs, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Lint with ruff, and hold the tree to its format; `--fix` mends both.

    nox -s lint
    nox -s lint -- --fix
    """
    if session.venv_backend != "none":
        session.install("-c", str(CONSTRAINTS), "ruff")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", *(() if "--fix" in session.posargs else ("--check",)), ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy, strictly.

    nox -s typecheck
    nox -s typecheck -- --pretty harness/case.py
    """
    set_up(session, "triton", "dev")
    session.run("python", "-m", "mypy", *session.posargs)


@nox.session(name="compile")
def compile_kernels(session: nox.Session) -> None:
    """Compile every kernel variant for gfx950, without a GPU, and print registers, LDS and spills.

    nox -s compile                                                  the embedded kernels
    nox -s compile -- --backend aiter-gluon --aiter-source DIR      a checkout of AITER
    nox -s compile -- --backend aiter-gluon --output base.json      keep the table
    nox -s compile -- --backend aiter-gluon --baseline base.json    fail on registers newly spilled
    """
    env = set_up(session, "triton")
    session.run("python", "-m", "harness.compile", *session.posargs, env=env | {"TRITON_INTERPRET": None})


@nox.session
def detect(session: nox.Session) -> None:
    """Put every known mistake before the gate and print which are caught, and how small they become.

    nox -s detect
    nox -s detect -- --only NAME
    """
    env = {"OMP_NUM_THREADS": "1"} | set_up(session, "triton")
    session.run("python", "-m", "harness.detect", *session.posargs, env=env)


@nox.session
def mutate(session: nox.Session) -> None:
    """Change a kernel in one place at a time and count which changes the gate notices.

    nox -s mutate
    nox -s mutate -- --list
    nox -s mutate -- --backend triton-splitkv --sample 40
    """
    env = {"OMP_NUM_THREADS": "1"} | set_up(session, "triton")
    session.run("python", "-m", "harness.mutate", *session.posargs, env=env)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the reference's speed and memory, as ratios within one run.

    nox -s bench
    nox -s bench -- --help
    """
    env = set_up(session, "triton")
    session.run("python", "-m", "harness.bench", *session.posargs, env=env)

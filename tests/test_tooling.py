"""The project's own commands: what they install, what they refuse to install, and that they are described.

1. The sessions of noxfile.py are tested with the real nox and the real pip, without a package index.
2. A container's torch is played by a small package that says it was built for ROCm.

Source: noxfile.py states the rules that these tests hold.
"""

from __future__ import annotations

import importlib.util
import os
import re
import site
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("nox", reason="nox is what is tested here: pip install nox")


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile_under_test", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its module up
    spec.loader.exec_module(module)
    return module


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


class Recorder:
    """A session that installs nothing and writes down what it was asked to."""

    def __init__(self, folder: Path) -> None:
        self.installed: list[tuple[str, ...]] = []
        self.messages: list[str] = []
        self.name = "gate"
        self.venv_backend = "venv"
        self.bin = str(folder / "bin")
        self.folder = folder
        self.virtualenv = SimpleNamespace(location=str(folder))
        (folder / "lib" / "python3" / "site-packages").mkdir(parents=True)

    def install(self, *arguments: str) -> None:
        self.installed.append(arguments)

    def log(self, message: str) -> None:
        self.messages.append(message)

    def warn(self, message: str) -> None:
        self.messages.append(message)

    def error(self, message: str) -> None:
        raise AssertionError(message)

    def create_tmp(self) -> str:
        return str(self.folder)


def environment(noxfile: ModuleType, **fields: object) -> object:
    plain = {"torch": None, "accelerator": None, "device": False, "sites": (), "distributions": {}}
    return noxfile.Environment(**(plain | fields))


def test_without_a_gpu_torch_is_installed_alone_first_and_pinned(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxfile, "probe", lambda python: environment(noxfile))
    session = Recorder(tmp_path / "venv")
    noxfile.install(session, noxfile.requirements("triton", "dev"))
    first, second = session.installed
    assert first[:2] == second[:2] == ("-c", str(ROOT / "constraints.txt"))
    assert [noxfile.Requirement(text).name for text in first[2:]] == ["torch"]
    assert {"triton", "numpy", "hypothesis", "pytest"} <= {noxfile.Requirement(text).name for text in second[2:]}


def test_a_torch_that_nox_does_not_run_in_is_pointed_out(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = environment(noxfile, torch="2.9.0+rocm7.0", accelerator="7.0")
    monkeypatch.setattr(noxfile.shutil, "which", lambda name: "/opt/venv/bin/python3")
    monkeypatch.setattr(noxfile, "probe", lambda python: there if "opt" in python else environment(noxfile))
    session = Recorder(tmp_path / "venv")
    noxfile.install(session, noxfile.requirements("triton"))
    assert "/opt/venv/bin/python3 -m pip install nox && /opt/venv/bin/python3 -m nox -s gate" in session.messages[-1]


def test_a_rocm_torch_is_used_and_neither_torch_nor_triton_is_installed(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"torch": "2.9.0+rocm7.0", "pytorch-triton-rocm": "3.5.0", "numpy": "1.26.4", "pytest": "7.0", "odd": "git"}
    host = environment(noxfile, torch="2.9.0+rocm7.0", accelerator="7.0", sites=(str(tmp_path),), distributions=there)
    monkeypatch.setattr(noxfile, "probe", lambda python: host)
    session = Recorder(tmp_path / "venv")
    noxfile.install(session, noxfile.requirements("triton", "dev"))
    (only,) = session.installed
    asked = {noxfile.Requirement(text).name for text in only[2:]}
    assert not asked & {"torch", "triton"}
    assert {"hypothesis", "pytest"} <= asked
    kept = Path(only[1]).read_text(encoding="utf-8").split()
    assert kept == ["numpy==1.26.4", "pytorch-triton-rocm==3.5.0", "torch==2.9.0+rocm7.0"]


def test_a_torch_that_slips_in_beside_the_rocm_torch_is_an_error(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = environment(noxfile, torch="2.9.0+rocm7.0", accelerator="7.0")
    monkeypatch.setattr(noxfile, "probe", lambda python: host)
    session = Recorder(tmp_path / "venv")
    (noxfile.site_packages(session) / "torch").mkdir()
    with pytest.raises(AssertionError, match=r"brought its own torch or triton beside 2\.9\.0\+rocm7\.0"):
        noxfile.install(session, noxfile.requirements("triton"))


def make_container(folder: Path) -> Path:
    """Build an interpreter with a torch for ROCm in it, and behind it the packages of this interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(
        textwrap.dedent(
            """
            from types import SimpleNamespace
            __version__ = "2.9.0+rocm7.0"
            version = SimpleNamespace(hip="7.0.51831", cuda=None)
            cuda = SimpleNamespace(is_available=lambda: False)
            """
        ),
        encoding="utf-8",
    )
    metadata = packages / "torch-2.9.0+rocm7.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0+rocm7.0\n", encoding="utf-8")
    (metadata / "RECORD").write_text("", encoding="utf-8")
    (metadata / "INSTALLER").write_text("container\n", encoding="utf-8")
    (packages / "source-tree.pth").write_text(str(folder / "aiter-checkout") + "\n", encoding="utf-8")
    (folder / "aiter-checkout" / "aiter").mkdir(parents=True)
    (folder / "aiter-checkout" / "aiter" / "__init__.py").write_text("", encoding="utf-8")
    behind = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(behind)]
    (packages / "zz-behind.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


SEEN = "import aiter, pytest, torch as t; print('seen', t.__version__, t.version.hip, t.__file__, aiter.__file__)"


def test_in_a_container_a_real_session_runs_on_the_containers_torch(tmp_path: Path) -> None:
    python = make_container(tmp_path / "container")
    project = tmp_path / "project"
    project.mkdir()
    for name in ("noxfile.py", "pyproject.toml", "constraints.txt"):
        (project / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    # One more session, which needs no index: what it asks for is there already.
    with (project / "noxfile.py").open("a", encoding="utf-8") as file:
        file.write(
            "\n\n@nox.session\n"
            "def show(session: nox.Session) -> None:\n"
            "    install(session, requirements('triton'))\n"
            f"    session.run('python', '-c', {SEEN!r})\n"
        )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NOX", "PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(python), "-m", "nox", "-s", "show"],
        cwd=project,
        env=env | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_NO_INPUT": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("seen"))
    assert seen.split()[1:3] == ["2.9.0+rocm7.0", "7.0.51831"]
    assert str(tmp_path / "container") in seen.split()[3]
    assert str(tmp_path / "container" / "aiter-checkout") in seen.split()[4]
    installed = {path.name for path in project.glob(".nox/show/lib/python*/site-packages/*")}
    assert not any(name.startswith(("torch", "triton")) for name in installed)


def test_an_interpreter_whose_torch_does_not_import_has_no_torch(noxfile: ModuleType, tmp_path: Path) -> None:
    python = make_container(tmp_path / "container")
    package = next((tmp_path / "container").glob("lib/python*/site-packages/torch/__init__.py"))
    package.write_text("raise OSError('libamdhip64.so: cannot open shared object file')", encoding="utf-8")
    found = noxfile.probe(str(python))
    assert (found.torch, found.accelerator, found.device) == (None, None, False)
    package.write_text("import os; os._exit(11)", encoding="utf-8")
    noxfile.probe.cache_clear()
    assert noxfile.probe(str(python)).torch is None


def test_tritons_interpreter_is_chosen_only_where_no_device_is_seen(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(noxfile, "probe", lambda python: environment(noxfile, torch="2.13.0"))
    assert noxfile.variables("python") == {"TRITON_INTERPRET": "1"}
    monkeypatch.setattr(noxfile, "probe", lambda python: environment(noxfile, torch="2.13.0", device=True))
    assert noxfile.variables("python") == {}


def test_every_requirement_of_a_cpu_machine_is_pinned(noxfile: ModuleType) -> None:
    pinned = {noxfile.canonicalize_name(name): version for name, version in pins().items()}
    for requirement in noxfile.requirements("triton", "dev"):
        name = noxfile.canonicalize_name(requirement.name)
        assert name in pinned, f"{name} is required but not pinned in constraints.txt"
        assert pinned[name] in requirement.specifier


def test_constraints_are_exact_versions_and_nothing_else() -> None:
    for name, version in pins().items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name), name
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), (name, version)


def test_every_session_explains_itself_with_its_own_command(noxfile: ModuleType) -> None:
    source = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    found = re.findall(r'@nox\.session(?:\((?:name="([\w-]+)")?.*\))?\ndef (\w+)', source)
    sessions = {name or function: getattr(noxfile, function).__doc__ for name, function in found}
    assert {"gate", "tests", "lint", "typecheck", "bench", "mla-gate"} <= set(sessions)
    assert len(sessions) == source.count("@nox.session")
    assert set(noxfile.nox.options.sessions) <= set(sessions)
    for name, manual in sessions.items():
        assert manual and f"nox -s {name}" in manual, f"session {name} does not show its command"


@pytest.mark.parametrize(("there", "lacking", "made"), [(False, True, True), (True, True, False), (False, False, False)])
def test_the_command_makes_its_environment_where_there_is_none(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, lacking: bool, made: bool
) -> None:
    ran: list[tuple[str, ...]] = []
    python = tmp_path / ".nox" / "gate" / "bin" / "python"
    if there:
        python.parent.mkdir(parents=True)
        python.touch()
    here = {} if lacking else {one.name: "1" for one in noxfile.requirements()}
    monkeypatch.setattr(noxfile, "ROOT", tmp_path)
    monkeypatch.setattr(noxfile, "probe", lambda python: environment(noxfile, torch=None, distributions=here))
    session = SimpleNamespace(posargs=["--folder", "x"], run=lambda *command, **options: ran.append(command))
    noxfile.demo(session)
    assert ran[:-1] == ([(sys.executable, "-m", "nox", "--install-only", "-s", "gate")] if made else [])
    chosen = str(python) if there else sys.executable
    assert ran[-1] == (chosen, "-m", "harness.cli", "demo", "--folder", "x")


def test_ci_runs_each_default_session_and_the_readmes_test_command(noxfile: ModuleType) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert set(re.findall(r"^step nox -s (\w+)", script, re.MULTILINE)) == set(noxfile.nox.options.sessions)
    assert "step nox -s tests\n" in script


def test_ci_is_valid_bash_and_may_be_executed() -> None:
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True, timeout=30)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_packages_named_for_installation_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert (ROOT / pattern.rstrip("*") / "__init__.py").exists()


def test_a_warning_in_a_test_is_an_error() -> None:
    with pytest.raises(UserWarning, match="on purpose"):
        warnings.warn("on purpose", stacklevel=1)

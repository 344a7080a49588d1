"""What a run ran on: versions, devices and the commit.

1. Nothing here imports a kernel's package: versions are read from what is installed.
2. What cannot be told is left out, never guessed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

#: Packages whose version changes numerics.
_PACKAGES = ("torch", "triton", "pytorch-triton-rocm", "numpy", "hypothesis", "aiter", "amd-aiter", "mla-gate")


def environment(device: str = "cpu") -> dict[str, str]:
    """Tell what a run on a device runs on: key to text."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "device": device}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    for name, version in (("rocm", torch.version.hip), ("cuda", torch.version.cuda)):
        if version:
            found[name] = version
    if device.startswith("cuda") and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.device(device))
        found["gpu"] = properties.name
        found["arch"] = getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        found["triton-mode"] = "interpreter"
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _commit() -> str | None:
    """Find the commit of the gate's own sources, with ``+`` where they were changed since."""
    home = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(home), "rev-parse", "--short=12", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(["git", "-C", home, "diff", "--quiet", "HEAD"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if dirty.returncode else "") if head.returncode == 0 else None

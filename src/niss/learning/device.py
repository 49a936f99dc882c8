"""Where to compute: the GPU where there is one, unless told otherwise."""

from __future__ import annotations

import torch

from niss.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


def choose_device(wanted: str, *, field: str = "device") -> str:
    """`cpu` or `cuda`; `auto` is the GPU where there is one. `field` is what a refusal names."""
    if wanted not in DEVICES:
        raise ConfigError(f"unknown device {wanted!r}", field=field, hint="use one of: " + ", ".join(DEVICES))
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "torch finds no CUDA GPU here",
            field=field,
            hint="use auto or cpu, or install a torch with CUDA on a machine with a GPU",
        )
    return "cuda" if available and wanted != "cpu" else "cpu"

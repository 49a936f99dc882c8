"""Modules and losses that mix records, remember them or draw: refused by name, with what to use instead.

What one record contributes must be a function of that record and the weights alone. `niss.records` shows a model one
record at a time, so that statistics of a batch cannot leak in; but then layers that are made for batches do
not do what they are made for, and are refused. Whatever draws is refused as well: masks from a known seed, by the
place in the batch, are not independent of the other records (adding one moves the sum by far more than C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from niss.errors import ConfigError
from niss.records.batches import FloatArray


def require_single_records(module: nn.Module, loss: object) -> None:
    """Refuse a module or a loss whose value for one record is not that record's alone, naming the layer."""
    for name, part in module.named_modules():
        for problem, hint in _faults(part):
            where = f"{name} ({type(part).__name__})" if name else type(part).__name__
            raise ConfigError(f"{where} {problem}", field="model", hint=hint)
    if isinstance(loss, nn.Module):
        if getattr(loss, "weight", None) is not None and getattr(loss, "reduction", "") == "mean":
            raise ConfigError(
                "class weights cancel in the weighted mean over one record",
                field="loss",
                hint='use reduction="sum", with weights that do not come from the records',
            )
        if any(parameter.requires_grad for parameter in loss.parameters()):
            raise ConfigError(
                "has parameters of its own, which nobody would train",
                field="loss",
                hint="make them part of the model, or freeze them: loss.requires_grad_(False)",
            )


def _faults(part: nn.Module) -> Iterator[tuple[str, str]]:
    """What is wrong with one layer, and what to do."""
    if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
        yield (
            "mixes the records of a batch",
            "use GroupNorm or LayerNorm; a BatchNorm that is only fine-tuned can be frozen by .eval()",
        )
    elif isinstance(part, _InstanceNorm) and part.track_running_stats and part.training:
        yield "remembers the records that it has seen", "use track_running_stats=False"
    elif _draws(part):
        yield (
            "draws at random in train() mode",
            "call model.eval() or set its p to 0: clipping and noise regularise already",
        )


def _draws(part: nn.Module) -> bool:
    if not part.training:
        return False
    if isinstance(part, _DropoutNd):
        return part.p > 0
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
        return part.dropout > 0 and getattr(part, "num_layers", 2) > 1
    return isinstance(part, nn.RReLU)


def require_no_draws(run: Callable[[], FloatArray]) -> FloatArray:
    """What `run` returns; refuses what takes numbers from torch's generators, or returns something else next time."""
    before = _generators()
    found, again = run(), run()
    apart, length = (np.linalg.norm(np.nan_to_num(part)) for part in (again - found, found))
    # On a GPU sums may differ in their last digits from one time to the next.
    if apart > 1e-3 * length or not all(map(torch.equal, before, _generators())):
        raise ConfigError(
            "draws random numbers in its forward pass or its loss",
            field="model",
            hint="call model.eval(); augmentation belongs into the examples, before training",
        )
    return found


def _generators() -> list[Tensor]:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state_all() if initialized else [])]

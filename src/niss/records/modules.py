"""Clipped gradients of any torch module: many records at once, each alone.

`torch.func.vmap` runs the module on a chunk of records as if each were a batch of one: nothing that it does with its
batch can mix two of them. What flows through the usual layers is tapped (`niss.records.taps`), so that their gradients
need not be computed; other parameters have a copy for each record, whose slopes are the gradients.

Chunks have one shape, and one takes as long as another whatever is in it. On a CUDA device they are captured once in a
graph and replayed: a chunk is a hundred small kernels, and each would else wait for the processor. A module that can be
stacked cannot branch on values, so what raises an exception in it is a whole number out of range (a label, a token), or
an operation that checks its values (`BCELoss`, a Cholesky factor). The first depends on the record and not on the
weights: `_screen` tries every different combination of whole numbers once, on the processor, and puts filler that
counts for nothing in the place of records with one that raises. The second is found by weights and inputs that are not
finite or zero (`_checks_values`). Such modules, and those that cannot be stacked, are differentiated one record after
another, always: those that fail contribute zero, and how long they take is up to the module. A chunk that raises all
the same is taken so too, since a sum must not depend on it, and the node's log says that it took longer.

What one record contributes must be a function of that record and the weights alone. Layers that mix records, remember
them or draw are refused by name, with what to use instead: shown one record at a time, layers made for batches do not
do what they are made for, and masks from a known seed, by the place in the batch, are not independent of the other
records (adding one moves the sum by far more than C).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from niss.errors import ConfigError
from niss.learning.local import FlatLayout, mean_loss, trainable_parameters
from niss.learning.stackable import as_function
from niss.randomness import SimStream
from niss.records.batches import FloatArray, IntArray
from niss.records.closed_form import clipped, segments
from niss.records.parts import Gradients, Part
from niss.records.taps import Call, Taps, UsedOtherwise, parts_of

Entries = dict[str, Tensor]
Parts = dict[str, Part]
# Numbers that are kept of a chunk, so that a model of a million parameters needs some hundred MB; records in a chunk.
# On a CUDA device some GB, and as many records as it takes to fill it.
_NUMBERS, _LARGEST = 2**24, 256
_NUMBERS_CUDA, _LARGEST_CUDA = 2**30, 1024

LOG = logging.getLogger(__name__)


class ModuleEngine:
    """The gradients of a module's trained parameters over these records."""

    def __init__(self, module: nn.Module, inputs: Any, labels: Any, loss: Any, chunk: int | None) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"must be a torch.nn.Module, LinearRegression or LogisticRegression, not {type(module).__name__}",
                field="model",
            )
        require_single_records(module, loss)
        self._module, self._loss = module, mean_loss if loss is None else loss
        self._device = next(iter(trainable_parameters(module).values())).device
        self.layout = trained_layout(module)
        self._inputs, self._labels = torch.as_tensor(inputs), torch.as_tensor(labels)
        self._on_cuda = self._device.type == "cuda"
        self._forward = as_function(module)
        self.weights: FloatArray = self.layout.flatten(module).double().cpu().numpy()
        self._copied: set[str] = set()  # parameters that autograd differentiates, with a copy for each record
        numbers = self._probe()
        self._stackable, self._sound = numbers is not None, torch.ones(len(self._labels), dtype=torch.bool)
        if self._stackable:
            self._keep_time()
        most, largest = (_NUMBERS_CUDA, _LARGEST_CUDA) if self._on_cuda else (_NUMBERS, _LARGEST)
        self.chunk = chunk or (2 ** int(np.log2(min(largest, max(1, most // numbers)))) if numbers else 32)
        self._captured: dict[int, _CapturedSums] = {}  # by the number of sums

    def zeros(self, count: int) -> Tensor:
        """See `RecordEngine`."""
        return torch.zeros((count, self.layout.size), dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def sums(self, weights: FloatArray, rows: IntArray, counts: Sequence[int], clip: float) -> Tensor:
        """See `RecordEngine`."""
        if self._on_cuda and self._stackable:
            return self._captured_sums(len(counts))(weights, rows, counts, clip)
        real, places = sum(counts), segments(counts, len(rows))
        if (found := self._together(weights, rows, real, clip)) is None:
            each = torch.from_numpy(self._one_by_one(weights, rows[:real], clip)).to(self._device)
            return torch.stack([each[some].sum(0) for some in places])
        parts, factors = found
        totals = self.zeros(len(counts))
        for total, some in zip(totals, places, strict=True):
            for name, place in self.layout.split(total).items():
                if name in parts:
                    place.copy_(parts[name].some(some).total(factors[some]))
        return totals

    @torch.no_grad()
    def each(self, weights: FloatArray, rows: IntArray, clip: float) -> FloatArray:
        """See `RecordEngine`."""
        if (found := self._together(weights, rows, len(rows), clip)) is None:
            return self._one_by_one(weights, rows, clip)
        parts, factors = found
        return np.asarray(self._gradients(parts, len(rows)).mul_(factors[:, None]).cpu().numpy())

    def _captured_sums(self, count: int) -> _CapturedSums:
        count = 2 ** (count - 1).bit_length()  # some are left over, and fewer are captured
        if count not in self._captured:
            self._captured[count] = _CapturedSums(self, count)
        return self._captured[count]

    def _gradients(self, parts: Parts, real: int) -> Tensor:
        """Those of the first records, a row each."""
        gradients = torch.zeros((real, self.layout.size), dtype=torch.float64, device=self._device)
        for name, place in self.layout.split(gradients).items():
            if name in parts:
                place.copy_(parts[name].each()[:real])
        return gradients

    def alone(self, weights: FloatArray, row: int) -> FloatArray:
        """See `RecordEngine`."""
        gradient = self._in_float64._gradient(weights, row)
        return gradient if self._sound[row] else np.full_like(gradient, np.nan)

    @cached_property
    def _in_float64(self) -> ModuleEngine:
        return self._copied_to(dtype=torch.float64)

    def _copied_to(self, **where: Any) -> ModuleEngine:
        """The same with a module on another device, or of another kind of numbers."""
        loss = copy.deepcopy(self._loss).to(**where) if isinstance(self._loss, nn.Module) else self._loss
        module = copy.deepcopy(self._module).to(**where)
        return ModuleEngine(module, self._inputs, self._labels, loss, self.chunk)

    def _keep_time(self) -> None:
        """Have no chunk raise an exception, as far as can be; on a GPU a bad index would end the process."""
        if self._device.type != "cpu":
            self.chunk = _LARGEST
            twin = self._copied_to(device="cpu")
            self._stackable, self._sound = twin._stackable, twin._sound
            self._inputs, self._labels = twin._inputs, twin._labels
        elif self._checks_values():
            self._stackable = False
        else:
            self._screen()

    def _checks_values(self) -> bool:
        """Whether an operation looks at values: it may raise on one record, at weights of a server's choice."""
        made = [_made_up(part) for part in (self._inputs, self._labels)]
        for value in (math.nan, math.inf, 0.0):
            filled = [torch.full_like(part, value) if part.is_floating_point() else part for part in made]
            for weights, (inputs, labels) in (
                (np.full_like(self.weights, value), made),
                (self.weights, filled),
            ):
                try:
                    self._stacked(self._entries(weights), self._as_taken(inputs), self._as_taken(labels))
                except Exception:  # whatever a user's module raises
                    return True
        return False

    @torch.no_grad()
    def _screen(self) -> None:
        """Find records whose whole numbers make model or loss raise an exception, and put made-up ones there."""
        parts = self._inputs, self._labels
        whole = [part.flatten(1) if part.ndim > 1 else part[:, None] for part in parts]
        whole = [part.long().cpu() for part in whole if not part.is_floating_point()]
        if not whole or not len(self._labels):
            return
        numbers = torch.cat(whole, 1)
        different, kinds = torch.unique(numbers, dim=0, return_inverse=True)
        # A record of each kind; other numbers are made up.
        first = torch.full((len(different),), len(numbers)).scatter_reduce_(
            0, kinds, torch.arange(len(numbers)), "amin"
        )
        raises = torch.zeros(len(different), dtype=torch.bool)
        for start in range(0, len(different), _LARGEST):
            some = torch.arange(start, min(start + _LARGEST, len(different)))
            if self._raises(first[some]):
                raises[some] = torch.tensor([self._raises(first[one : one + 1]) for one in some.tolist()])
        self._sound = ~raises[kinds]
        if bool(raises.any()):
            self._inputs, self._labels = (self._mended(part) for part in parts)

    def _mended(self, part: Tensor) -> Tensor:
        """With zeros for the whole numbers of records that raise."""
        if part.is_floating_point():
            return part
        lost = ~self._sound.to(part.device)
        return part.masked_fill(lost.view(-1, *[1] * (part.ndim - 1)), 0)

    def _raises(self, rows: Tensor) -> bool:
        """Whether records with the whole numbers of these raise, stacked."""
        entries = self._entries(self.weights)
        inputs, labels = (
            _made_up(part, len(rows)) if part.is_floating_point() else part[rows]
            for part in (self._inputs, self._labels)
        )

        def record_loss(values: Tensor, label: Tensor) -> Tensor:
            return self._one_loss(self._forward(entries, values[None]), label[None])

        try:
            vmap(record_loss, randomness="error")(self._as_taken(inputs), self._as_taken(labels))
        except Exception:  # whatever a user's module raises
            return True
        return False

    def _together(
        self, weights: FloatArray, rows: IntArray, real: int, clip: float
    ) -> tuple[Parts, Tensor] | None:
        """Gradients by name, and their factors min(1, C / norm); both zero where a record counts for nothing.

        A factor below the least normal number would have lost its digits: a record that needs one, of norm 1e38 C in
        float32, has overflown too.
        """
        if not self._stackable:
            return None
        try:
            parts, losses = self._stacked(self._entries(weights), *self._take(rows))
        except Exception as problem:  # of a record, or of all of them: one by one will tell
            LOG.warning(
                "%s: a chunk of records is differentiated one by one, which may show in the time that it takes",
                type(problem).__name__,
            )
            return None
        counted = (torch.arange(len(rows)) < real).logical_and(self._sound[rows]).to(self._device)
        return self._scaled(parts, losses, counted, clip)

    def _scaled(
        self, parts: Parts, losses: Tensor, counted: Tensor, clip: float | Tensor
    ) -> tuple[Parts, Tensor]:
        """Gradients and their factors; of those that are `counted`, and have a gradient."""
        norms = torch.linalg.vector_norm(torch.stack([part.norms() for part in parts.values()]), dim=0)
        factors = torch.where(norms > clip, clip / norms, 1.0)
        used = norms.isfinite() & losses.isfinite() & (factors >= torch.finfo(self.layout.dtype).tiny)
        used &= counted
        # Also where nothing is to be left out: it takes its time.
        parts = {name: part.without(~used) for name, part in parts.items()}
        return parts, torch.where(used, factors, 0.0).to(self.layout.dtype)

    def _one_by_one(self, weights: FloatArray, rows: IntArray, clip: float) -> FloatArray:
        """As `each`, by one forward and backward pass for each record."""
        return np.stack(
            [np.zeros(self.layout.size), *(clipped(self._gradient(weights, int(row)), clip) for row in rows)]
        )[1:]

    def _gradient(self, weights: FloatArray, row: int) -> FloatArray:
        """Of one record; not a number where its loss is not finite, and where module or loss raise an exception."""
        try:
            gradient = self._differentiate(weights, *self._take(np.array([row])))
            return gradient if self._sound[row] else np.full_like(gradient, np.nan)
        except Exception:  # whatever a user's module raises: the record counts for nothing
            return np.full(self.layout.size, np.nan)

    def _differentiate(self, weights: FloatArray, inputs: Tensor, labels: Tensor) -> FloatArray:
        entries = self._entries(weights)
        trained = [entries[name].requires_grad_() for name in self.layout.names]
        with torch.enable_grad():
            loss = self._one_loss(self._forward(entries, inputs), labels)
            slopes = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        flat = torch.cat([slope.reshape(-1) for slope in slopes]).double().cpu().numpy()
        return np.asarray(flat if loss.isfinite() else np.full_like(flat, np.nan))

    def _stacked(self, entries: Entries, inputs: Tensor, labels: Tensor) -> tuple[Parts, Tensor]:
        """Gradients by name, and losses [records]; parameters that have no say in the loss are left out."""
        count = len(inputs)
        tapped = {
            name: entries[name].requires_grad_() for name in self.layout.names if name not in self._copied
        }
        copies = {
            name: entries[name].expand(count, *entries[name].shape).requires_grad_() for name in self._copied
        }
        fixed = {name: value for name, value in entries.items() if name not in self.layout.names}
        names = {id(value): name for name, value in tapped.items()}
        calls: list[Call] = []

        def record_loss(own: Entries, values: Tensor, label: Tensor, lane: Tensor) -> Tensor:
            with Taps(names, lane, calls):
                outputs = self._forward(tapped | own | fixed, values[None])
            return self._one_loss(outputs, label[None])

        lanes = torch.arange(count, device=self._device)
        with torch.enable_grad():
            losses = vmap(record_loss, randomness="error")(copies, inputs, labels, lanes)
            trained = tapped | copies
            slopes = torch.autograd.grad(
                losses, list(trained.values()), torch.ones_like(losses), allow_unused=True
            )
        found = {name: slope for name, slope in zip(trained, slopes, strict=True) if slope is not None}
        if stray := found.keys() & tapped.keys():
            raise UsedOtherwise(stray)
        parts: Parts = {name: Gradients(slope) for name, slope in found.items()}
        return parts | parts_of(calls), losses.detach()

    def _one_loss(self, outputs: Any, labels: Tensor) -> Tensor:
        loss = self._loss(outputs, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"must return one number for a batch of one record, not {shape}",
                field="loss",
                hint='average or sum over the positions of a record: reduction="mean" or "sum"',
            )
        return loss.reshape(())

    def _entries(self, weights: FloatArray | Tensor) -> Entries:
        """Trained parameters at `weights`, and buffers as copies: what a forward pass writes there is gone after it."""
        vector = torch.as_tensor(weights).to(dtype=self.layout.dtype, device=self._device, copy=True)
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        return self.layout.split(vector) | buffers

    def _take(self, rows: IntArray) -> tuple[Tensor, Tensor]:
        places = torch.from_numpy(rows)
        return self._as_taken(self._inputs[places]), self._as_taken(self._labels[places])

    def _as_taken(self, values: Tensor) -> Tensor:
        dtype = self.layout.dtype if values.is_floating_point() else values.dtype
        return values.to(device=self._device, dtype=dtype)

    def _probe(self) -> int | None:
        """Numbers that are kept of a record, None if records cannot be stacked; refuses a module that does not run.

        Tried on two records that are made up, so that none has a say in it. Stacked, the first must have the gradient
        that it has alone: else one by one is the way.
        """
        inputs, labels = (self._as_taken(_made_up(part)) for part in (self._inputs, self._labels))
        try:
            alone = require_no_draws(lambda: self._differentiate(self.weights, inputs[:1], labels[:1]))
        except ConfigError:
            raise
        except Exception as problem:
            raise ConfigError(
                f"model and loss fail on a made-up record: {type(problem).__name__}: {problem}",
                field="model",
                hint=f"its inputs have shape {tuple(inputs[:1].shape)}, its labels {tuple(labels[:1].shape)}, "
                f"{labels.dtype}; whole numbers are 0, others between 0 and 1",
            ) from problem
        while True:
            try:
                parts, _ = self._stacked(self._entries(self.weights), inputs, labels)
                stacked = self._gradients(parts, 1).cpu().numpy()[0]
            except UsedOtherwise as found:
                self._copied |= found.names
            except Exception:  # torch refuses to stack in many ways; one by one always works
                return None
            else:
                error, length = (np.linalg.norm(np.nan_to_num(part)) for part in (stacked - alone, alone))
                if error > 1e-3 * length:
                    return None
                return sum(part.numbers for part in parts.values()) // len(inputs) + 1


class _CapturedSums:
    """`ModuleEngine.sums` for so many sums as a CUDA graph, which reads weights, records and clip where they are put.

    Nothing in it asks the device for a value.
    """

    def __init__(self, engine: ModuleEngine, count: int) -> None:
        self._engine, device = engine, engine._device
        self._weights = torch.tensor(engine.weights, device=device)
        self._clip = torch.ones((), dtype=torch.float64, device=device)
        self._inputs, self._labels = engine._take(np.zeros(engine.chunk, dtype=np.int64))
        # The number of the sum that a record belongs to; of one that counts for nothing, -1.
        self._owners = torch.full((engine.chunk,), -1, device=device)
        self._totals = engine.zeros(count)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # kernels are compiled and handles made before anything is captured
            self._compute()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._compute()

    def _compute(self) -> None:
        engine = self._engine
        parts, losses = engine._stacked(engine._entries(self._weights), self._inputs, self._labels)
        parts, factors = engine._scaled(parts, losses, self._owners >= 0, self._clip)
        for number, total in enumerate(self._totals):
            own = torch.where(self._owners == number, factors, 0.0)
            for name, place in engine.layout.split(total).items():
                if name in parts:
                    place.copy_(parts[name].total(own))

    def __call__(self, weights: FloatArray, rows: IntArray, counts: Sequence[int], clip: float) -> Tensor:
        inputs, labels = self._engine._take(rows)
        self._inputs.copy_(inputs)
        self._labels.copy_(labels)
        self._weights.copy_(torch.from_numpy(weights))
        owners = np.full(len(rows), -1)
        owners[: sum(counts)] = np.repeat(np.arange(len(counts)), counts)
        owners[~self._engine._sound[rows].numpy()] = -1
        self._owners.copy_(torch.from_numpy(owners))
        self._clip.fill_(clip)
        self._graph.replay()
        return self._totals[: len(counts)]


def _made_up(part: Tensor, count: int = 2) -> Tensor:
    """Records of this kind: zeros if they are whole numbers, else uniform on (0, 1), the same every time."""
    shape = (count, *part.shape[1:])
    if not part.is_floating_point():
        return torch.zeros(shape, dtype=part.dtype)
    return torch.from_numpy(SimStream(0).generator().random(shape)).to(part.dtype)


def trained_layout(module: nn.Module) -> FlatLayout:
    """Of the parameters that require a gradient alone, in the order of the module's state."""
    whole = FlatLayout.of(module)
    chosen = [place for place, trained in enumerate(whole.trainable) if trained]
    return replace(
        whole,
        names=tuple(whole.names[place] for place in chosen),
        shapes=tuple(whole.shapes[place] for place in chosen),
        trainable=(True,) * len(chosen),
    )


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

"""A model as one vector, what a client does with it in a round, and how good it is.

The vector is what is sent, clipped, noised and averaged. It holds every floating-point entry of the state dict,
parameters and floating buffers (such as BatchNorm running statistics) alike, in state-dict order. Integer and bool
entries (such as `num_batches_tracked`) have no meaningful average and no meaningful noise: they are never part of the
vector and stay as the module has them.

Training is the reference, one client at a time, to be read as pseudocode; every engine is tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import LongTensor, Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from niss.errors import ConfigError
from niss.randomness import SimStream


@dataclass(frozen=True)
class FlatLayout:
    """Which entry of a module lies where in its vector.

    names      of the entries, as in the state dict
    shapes     of the entries
    dtype      of all of them, float32 or float64
    trainable  whether an entry was a parameter that requires a gradient when the layout was made

    An entry that is the same tensor under several names (tied parameters) is counted once, under its
    first name. Layouts are values: two modules of one architecture have equal layouts.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    trainable: tuple[bool, ...]

    @classmethod
    def of(cls, module: nn.Module) -> FlatLayout:
        """The layout of `module`; refuses what one float32 or one float64 vector cannot hold.

        Raises `ConfigError` for lazy layers that have no shape yet, complex entries, mixed or other dtypes, and
        state dicts that do not show the module's own tensors.
        """
        first: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in _state(module).items():
            if is_lazy(tensor):
                raise ConfigError(
                    f"{name!r} has no shape yet",
                    field="model",
                    hint="run one batch through lazy layers first",
                )
            if tensor.is_complex():
                raise ConfigError(f"{name!r} is complex, only real entries are supported", field="model")
            if tensor.is_floating_point():
                first.setdefault(id(tensor), (name, tensor))
        entries = dict(first.values())
        if not entries:
            raise ConfigError("has no floating-point entries", field="model")
        _refuse_detached_state(module, entries)
        return cls(
            names=tuple(entries),
            shapes=tuple(tuple(tensor.shape) for tensor in entries.values()),
            dtype=_single_dtype(entries),
            trainable=tuple(tensor.requires_grad for tensor in entries.values()),
        )

    @property
    def sizes(self) -> list[int]:
        """How many numbers each entry has."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """The length of the vector."""
        return sum(self.sizes)

    def flatten(self, module: nn.Module) -> Tensor:
        """The entries of `module` as a new 1-D tensor of `dtype`."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self._entries(module)])

    @torch.no_grad()
    def load(self, module: nn.Module, vector: Tensor) -> None:
        """Copy `vector` into the entries of `module`; integer and bool entries stay as they are."""
        self.require_vector(vector)
        if vector.dtype != self.dtype:
            raise ConfigError(
                f"is {vector.dtype}, the model is {self.dtype}",
                field="vector",
                hint=f"convert it where the loss of digits is visible: vector.to({self.dtype})",
            )
        for tensor, piece in zip(self._entries(module), self.split(vector).values(), strict=True):
            tensor.copy_(piece)

    def split(self, vectors: Tensor) -> dict[str, Tensor]:
        """Views into a vector, or into a stack of them [..., size], by name, in the shape of each entry; any dtype."""
        if vectors.ndim == 1:
            self.require_vector(vectors)
        pieces = torch.split(vectors, self.sizes, dim=-1)
        return {
            name: piece.view((*vectors.shape[:-1], *shape))
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }

    def require_vector(self, vector: Tensor) -> None:
        """Refuse what is not 1-D of this layout's length."""
        if vector.ndim != 1 or vector.shape[0] != self.size:
            raise ConfigError(
                f"must be 1-D of length {self.size}, not of shape {tuple(vector.shape)}",
                field="vector",
                hint="layout.flatten(module) makes such a vector; this one was made for another model",
            )

    def trainable_mask(self) -> Tensor:
        """1-D bool: True where the entry was a parameter requiring grad when the layout was made."""
        return torch.tensor(self.trainable).repeat_interleave(torch.tensor(self.sizes))

    def _entries(self, module: nn.Module) -> Iterator[Tensor]:
        """The live tensors of `module` in the order of the vector; refuses a module of another layout."""
        state = _state(module)
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = state.get(name)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
                actual = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise ConfigError(
                    f"the layout expects {self.dtype} of shape {shape} at {name!r}, the module has {actual}",
                    field="model",
                    hint="make the layout from this module: FlatLayout.of(module)",
                )
            yield tensor


@dataclass(frozen=True)
class LocalTraining:
    """Local SGD: `epochs` passes in batches of `batch_size`; the update rule is torch.optim.SGD's.

    What each may be is said where it is set (`niss.simulation.sections`); `weight_decay * w` is added to the gradient.
    """

    epochs: int = 5
    batch_size: int = 10
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0


def batch_order(count: int, settings: LocalTraining, stream: SimStream) -> Iterator[LongTensor]:
    """The sample numbers of each batch, epoch after epoch: the one source of order for every engine.

    Epoch e runs through `stream.child("epoch", e).generator().permutation(count)` in pieces of
    `batch_size`; the last piece of an epoch may be short. `count` is the number of samples, at least 1.
    """
    for epoch in range(settings.epochs):
        permutation = stream.child("epoch", epoch).generator().permutation(count)
        order = torch.from_numpy(permutation.astype(np.int64, copy=False))
        for batch in torch.split(order, settings.batch_size):
            yield cast(LongTensor, batch)


def train_client(
    module: nn.Module,
    layout: FlatLayout,
    start: Tensor,
    images: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    *,
    stream: SimStream,
) -> Tensor:
    """Train from `start` on one client's samples; returns the update w_end - start as a new vector.

    module, layout  what is trained, as scratch space, and the layout of its vector
    start           the weights to begin at, as `layout.flatten` gives them
    images, labels  the client's samples, on the device of the module; a label is one class, or one for each
                    position of a sequence, whose losses are averaged
    settings        epochs, batches and the rule of SGD
    stream          whatever is random here

    Each step takes the gradient g of the mean cross-entropy over its batch, in train() mode, and
    moves the trainable parameters w as torch.optim.SGD does:

        g <- g + weight_decay * w;    v <- momentum * v + g  (v = g at first);    w <- w - learning_rate * v

    The result depends on the arguments alone: batches come from `batch_order(count, settings, stream)`,
    draws inside the module (Dropout) from `stream.child("torch")`, and torch's global generator is left
    undisturbed. The module is scratch space: its vector is overwritten, its other buffers and its mode
    are restored. Floating buffers moved by the forward pass (BatchNorm) are part of the update; frozen
    parameters have update zero. A diverged run returns non-finite entries; the caller decides.
    """
    highest_label = require_samples(images, labels)
    layout.load(module, start)
    parameters = list(trainable_parameters(module).values())
    velocities = [velocity_like(parameter.detach(), settings) for parameter in parameters]
    with borrowed(module, layout, stream), torch.enable_grad():
        for batch in batch_order(labels.shape[0], settings, stream):
            wanted = labels[batch]
            logits = require_logits(
                _forward(module, images[batch]), shape=wanted.shape, highest_label=highest_label
            )
            loss = mean_loss(logits, wanted)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            with torch.no_grad():
                for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                    if gradient is not None:  # what the loss does not reach stays as it is
                        sgd_step(parameter, velocity, gradient, settings)
    return layout.flatten(module).sub_(start.detach())


def _forward(module: nn.Module, batch: Tensor) -> object:
    """`module(batch)`, unchecked: a user's module can return anything."""
    try:
        return module(batch)
    except ValueError as problem:
        # BatchNorm cannot train on a single value per channel, as a short last batch of one can be.
        if batch.shape[0] == 1 and (layers := batch_statistics_layers(module)):
            raise ConfigError(
                f"leaves a batch of one sample, which {layers[0]!r} cannot train on",
                field="batch_size",
                hint="use another batch size, or GroupNorm in place of BatchNorm",
            ) from problem
        raise


def velocity_like(weights: Tensor, settings: LocalTraining) -> Tensor | None:
    """Zeros, from which `v <- momentum * v + g` gives `v = g` at first; None without momentum."""
    return weights.new_zeros(weights.shape) if settings.momentum else None


def sgd_step(weights: Tensor, velocity: Tensor | None, gradient: Tensor, settings: LocalTraining) -> None:
    """One step of torch.optim.SGD along `gradient`, in place, of one client or of many stacked; without autograd."""
    if settings.weight_decay:
        # Not in place: autograd may hand out one tensor for two parameters.
        gradient = gradient.add(weights, alpha=settings.weight_decay)
    if velocity is not None:
        gradient = velocity.mul_(settings.momentum).add_(gradient)
    weights.add_(gradient, alpha=-settings.learning_rate)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of logits [..., classes] over all labels [...]."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def sample_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each sample, [N]; of a sequence, labels [N, T], the mean over its positions.

    Sequences are of one length, so the mean over samples is the mean over all labels, `mean_loss`.
    """
    losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(labels.shape[0], -1).mean(dim=1)


@dataclass(frozen=True)
class Evaluation:
    """Share of labels that were predicted, mean cross-entropy (nats), and how many samples were used."""

    accuracy: float
    loss: float
    examples: int

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor) -> Evaluation:
        """From the two numbers of `score` for these labels."""
        right, loss = scores.tolist()
        count = labels.numel()
        return cls(accuracy=int(right) / count, loss=loss / count, examples=len(labels))


def evaluate(module: nn.Module, images: Tensor, labels: Tensor, *, batch_size: int = 1000) -> Evaluation:
    """Evaluate `module` in eval() mode, where its parameters are; its own mode is restored.

    The loss is computed and averaged in float64 over all labels, one for each sample or one for each position of
    it, and is reported as inf or nan when it is. The accuracy is always a number: where a nan is among the logits
    there is no prediction, which counts as wrong. `batch_size` bounds the memory and changes the last bits at most.
    """
    highest_label = require_samples(images, labels)
    scores = score(module, images, labels, batch_size=batch_size, highest_label=highest_label)
    return Evaluation.of(scores, labels)


@torch.no_grad()
def score(
    module: nn.Module, images: Tensor, labels: Tensor, *, batch_size: int, highest_label: int
) -> Tensor:
    """How many labels `module` gets right in eval() mode, and the sum of their losses, both float64.

    They stay where the model is: a device is not waited for. `highest_label` is what `require_samples` gave.
    """
    scores = torch.zeros(2, dtype=torch.float64, device=labels.device)
    parts = zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True)
    with in_mode(module, training=False):
        for some_images, some_labels in parts:
            logits = require_logits(module(some_images), shape=some_labels.shape, highest_label=highest_label)
            logits = logits.double()
            scores[0] += ((logits.argmax(dim=-1) == some_labels) & ~logits.isnan().any(dim=-1)).sum()
            scores[1] += functional.cross_entropy(
                logits.flatten(0, -2), some_labels.flatten(), reduction="sum"
            )
    return scores


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the module is in train() or eval() mode; afterwards every submodule has its own mode back."""
    before = [(part, part.training) for part in module.modules()]
    # Flags are set where they differ alone: torch takes long to set one, and a client may have few steps.
    if any(flag != training for _, flag in before):
        module.train(training)
    try:
        yield
    finally:
        for part, flag in before:
            if part.training != flag:
                part.training = flag


@contextmanager
def borrowed(module: nn.Module, layout: FlatLayout, stream: SimStream | None) -> Iterator[None]:
    """The module as scratch space for one client: whatever is not in its vector is as before afterwards.

    Inside, it is in train() mode and what it draws comes from `stream.child("torch")`; without a stream it is in
    eval() mode. Afterwards its mode, torch's generators and every buffer outside the vector (integer, bool,
    non-persistent) are restored: else what one client did would reach the next one through the module.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in layout.names}
    draws = nullcontext() if stream is None else seeded_torch(stream.child("torch"))
    try:
        with in_mode(module, training=stream is not None), draws:
            yield
    finally:
        with torch.no_grad():
            for name, saved in before.items():
                module.get_buffer(name).copy_(saved)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch and BLAS compute with that many threads: small steps are fastest, and repeatable, with one.

    More threads than free cores make both collapse, since they spin while they wait for each other.
    """
    with torch_threads(count), threadpool_limits(limits=count):
        yield


@contextmanager
def seeded_torch(stream: SimStream) -> Iterator[None]:
    """Inside, torch's default generators start at `stream`; afterwards they are as they were before.

    For code that can only use those generators: Dropout, default initialisation. The CPU generator is always
    covered, the CUDA generators once CUDA is initialised (a module that lives on a GPU has done that). CUDA is
    never initialised here: a run on the CPU should not pay for it, nor lose the ability to fork.
    """
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = list(range(torch.cuda.device_count())) if initialized else []
    with torch.random.fork_rng(devices=gpus):
        seed = stream.torch_seed()
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed_all(seed)
        yield


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; refuses a module without any."""
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    if not parameters:
        raise ConfigError(
            "has no trainable parameters", field="model", hint="set requires_grad on what shall be trained"
        )
    return parameters


def batch_statistics_layers(module: nn.Module) -> list[str]:
    """The names of torch's layers that mix the samples of a batch or keep running statistics of them."""
    return [
        name or type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) or (isinstance(part, _InstanceNorm) and part.track_running_stats)
    ]


def require_samples(images: Tensor, labels: Tensor) -> int:
    """Refuse an empty or mismatched set of samples; returns the highest label."""
    if labels.ndim not in (1, 2) or labels.dtype != torch.int64:
        raise ConfigError(
            f"must be int64 of shape [samples] or [samples, positions], not {labels.dtype} of shape "
            f"{tuple(labels.shape)}",
            field="labels",
            hint="labels.to(torch.int64) converts class numbers",
        )
    if images.ndim < 1 or images.shape[0] != labels.shape[0]:
        raise ConfigError(
            f"shape {tuple(images.shape)} does not hold one sample for each of {labels.shape[0]} labels",
            field="images",
            hint="the first dimension must be the sample",
        )
    if labels.numel() == 0:
        raise ConfigError(
            "no samples", field="images", hint="leave clients without data out before training or evaluation"
        )
    lowest, highest = labels.aminmax()
    # -100 in particular: cross_entropy would silently skip it (its ignore_index).
    if int(lowest) < 0:
        raise ConfigError(f"class numbers start at 0, found {int(lowest)}", field="labels")
    return int(highest)


def require_logits(logits: object, *, shape: Sequence[int], highest_label: int) -> Tensor:
    """Refuse a forward result that is not one row of class scores for each label, covering every label.

    `shape` is that of the labels: [samples], or [samples, positions].
    """
    if not isinstance(logits, Tensor) or not logits.ndim or tuple(logits.shape[:-1]) != tuple(shape):
        result = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        wanted = ", ".join(map(str, shape))
        raise ConfigError(
            f"forward must return logits of shape [{wanted}, classes] for {shape[0]} samples, not {result}",
            field="model",
        )
    if logits.shape[-1] <= highest_label:
        raise ConfigError(
            f"label {highest_label} is beyond the {logits.shape[-1]} classes of the model",
            field="labels",
            hint="build the model with as many classes as the data has",
        )
    return logits


def _state(module: nn.Module) -> dict[str, Tensor]:
    """The live tensors of the state dict; what `get_extra_state` adds is not numbers and is left out."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _single_dtype(entries: dict[str, Tensor]) -> torch.dtype:
    """The one dtype that all entries have; refuses mixtures, and what is neither float32 nor float64."""
    first_name, first = next((name, tensor.dtype) for name, tensor in entries.items())
    for name, tensor in entries.items():
        if tensor.dtype != first:
            raise ConfigError(
                f"mixes floating dtypes: {first_name!r} is {first}, {name!r} is {tensor.dtype}",
                field="model",
                hint="convert the whole module: module.float() or module.double()",
            )
    if first not in (torch.float32, torch.float64):
        raise ConfigError(f"is {first}, not float32 or float64", field="model", hint="use module.float()")
    return first


def _refuse_detached_state(module: nn.Module, entries: dict[str, Tensor]) -> None:
    """State-dict hooks may hand out copies or hide parameters: loading would then silently do nothing,
    or a parameter would train without ever being sent."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    listed = {id(tensor) for tensor in entries.values()}
    foreign = [name for name, tensor in entries.items() if id(tensor) not in own]
    trainable = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    hidden = [name for name, tensor in trainable.items() if id(tensor) not in listed]
    if foreign or hidden:
        raise ConfigError(
            f"its state dict does not hold the module's own tensors: {', '.join(foreign + hidden)}",
            field="model",
            hint="remove the state-dict hooks of the module",
        )

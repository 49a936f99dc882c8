"""A model as one vector: what is sent, clipped, noised and averaged.

The vector holds every floating-point entry of the state dict, parameters and floating buffers (such
as BatchNorm running statistics) alike, in state-dict order. Integer and bool entries (such as
`num_batches_tracked`) have no meaningful average and no meaningful noise: they are never part of the
vector and stay as the module has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from niss.errors import ConfigError


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

    def require_vector(self, vector: Tensor, *, field: str = "vector") -> None:
        """Refuse what is not 1-D of this layout's length; `field` is what the refusal names."""
        if vector.ndim != 1 or vector.shape[0] != self.size:
            raise ConfigError(
                f"must be 1-D of length {self.size}, not of shape {tuple(vector.shape)}",
                field=field,
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
        raise ConfigError(
            f"is {first}; only float32 and float64 are supported", field="model", hint="use module.float()"
        )
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

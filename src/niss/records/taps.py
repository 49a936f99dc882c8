"""Gradients of single records without computing them: what flows through linear layers, convolutions and embeddings.

The gradient of record i in a weight that takes p inputs a_t to q outputs, at T positions, where its loss has slopes d_t
in these outputs, is a sum of T outer products. Its norm, and the clipped sum over the records, need the a and the d
alone ("ghost norms": Goodfellow 2015, Li et al. 2022, Bu et al. 2023):

    g_i = sum_t d_t a_t^T,    ||g_i||^2 = sum_tu (a_t . a_u) (d_t . d_u),    sum_i f_i g_i = sum_it (f_i d_t) a_t^T.

`Taps` sees the calls of these operations while records are stacked by `torch.func.vmap`, so that none of them mixes two
records whatever the module does around them, and one backward pass brings the d of all. A weight that is used twice has
the positions of both uses; one that is also used in some other way is left to autograd, with a copy for each record.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.overrides import TorchFunctionMode

from niss.records.parts import EmbeddingRows, Gradients, Part, Products, Shape, worth_products


@dataclass
class Call(ABC):
    """One call of an operation with weights of ours: its inputs and, after the backward pass, its outputs' slopes.

    Values have the records as their first axis, and then the shape that the module gave to those of one record.
    """

    weight: str | None
    bias: str | None
    shape: Shape
    settings: tuple[Any, ...] = ()
    inputs: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def names(self) -> set[str]:
        """Of the weights of ours."""
        return {name for name in (self.weight, self.bias) if name is not None}

    @abstractmethod
    def compute(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs."""

    @abstractmethod
    def back(self, slopes: Tensor, values: Tensor, weight: Tensor) -> Tensor | None:
        """The slopes of the inputs."""

    @abstractmethod
    def part(self, uses: Sequence[Call]) -> Part:
        """The gradients in the weight, from all calls that used it."""

    def bias_gradients(self) -> Tensor:
        """Of each record, [records, q]."""
        assert self.slopes is not None
        return self.slopes.flatten(1, -2).sum(1)


class LinearCall(Call):
    """values [records, ..., p] times weight [q, p]."""

    def compute(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Call`."""
        return functional.linear(values, weight, bias)

    def back(self, slopes: Tensor, values: Tensor, weight: Tensor) -> Tensor | None:  # noqa: ARG002
        """See `Call`."""
        return slopes @ weight

    def part(self, uses: Sequence[Call]) -> Part:
        """See `Call`."""
        flows = [
            (use.inputs.flatten(1, -2), use.slopes.flatten(1, -2))
            for use in uses
            if use.inputs is not None and use.slopes is not None
        ]
        inputs, slopes = (
            torch.cat(flow, 1) if len(flow) > 1 else flow[0] for flow in zip(*flows, strict=True)
        )
        found = Products(inputs.mT[:, None], slopes.mT[:, None], self.shape)
        products = worth_products(inputs.shape[2], slopes.shape[2], inputs.shape[1])
        return found if products else Gradients(found.each())


class ConvolutionCall(Call):
    """A convolution of pictures [records, N, C, H, W], of height 1 where the weight has one axis.

    Settings are stride, padding, dilation and groups.
    """

    def compute(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Call`."""
        found = functional.conv2d(values.flatten(0, 1), _with_two_axes(weight), bias, *self.settings)
        return found.view(*values.shape[:2], *found.shape[1:])

    def back(self, slopes: Tensor, values: Tensor, weight: Tensor) -> Tensor | None:
        """See `Call`."""
        stride, padding, dilation, groups = self.settings
        pictures, kernel = values.flatten(0, 1), _with_two_axes(weight)
        found: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
            pictures.shape, kernel, slopes.flatten(0, 1), stride, padding, dilation, groups
        )
        return found.view(values.shape)

    def part(self, uses: Sequence[Call]) -> Part:
        """See `Call`."""
        calls = [use for use in uses if isinstance(use, ConvolutionCall)]
        groups, outputs = self.settings[3], self.shape[0]
        positions = sum(use.slopes[0, :, 0].numel() for use in calls if use.slopes is not None)
        products = worth_products(math.prod(self.shape[1:]), outputs // groups, positions)
        if not (products or self._on_cuda):
            return Gradients(torch.stack([use._gradients() for use in calls]).sum(0))
        flows = [use._flow() for use in calls]
        inputs, slopes = (
            torch.cat(flow, 3) if len(flow) > 1 else flow[0] for flow in zip(*flows, strict=True)
        )
        found = Products(inputs, slopes, self.shape)
        # A device multiplies the patches six times as fast as it convolves by group.
        return found if products else Gradients(found.each())

    def bias_gradients(self) -> Tensor:
        """See `Call`."""
        assert self.slopes is not None
        return self.slopes.sum((1, 3, 4))

    @property
    def _on_cuda(self) -> bool:
        return self.inputs is not None and self.inputs.is_cuda

    def _gradients(self) -> Tensor:
        """As one convolution in which each record is a group of its own."""
        assert self.inputs is not None
        assert self.slopes is not None
        stride, padding, dilation, groups = self.settings
        count, sides = len(self.inputs), (1, *self.shape[2:])[-2:]
        inputs, slopes = (values.transpose(0, 1).flatten(1, 2) for values in (self.inputs, self.slopes))
        shape = (count * self.shape[0], self.shape[1], *sides)
        found: Tensor = conv2d_weight(inputs, shape, slopes, stride, padding, dilation, count * groups)  # type: ignore[no-untyped-call]
        return found.view(count, *self.shape)

    def _flow(self) -> tuple[Tensor, Tensor]:
        """Patches [records, groups, C k k / groups, positions] and slopes."""
        assert self.inputs is not None
        assert self.slopes is not None
        stride, padding, dilation, groups = self.settings
        count, pictures = self.inputs.shape[:2]
        sides = (1, *self.shape[2:])[-2:]
        found = _patches(self.inputs.flatten(0, 1), sides, dilation, padding, stride)
        return (
            _by_group(found, count, pictures, groups),
            _by_group(self.slopes.flatten(0, 1).flatten(2), count, pictures, groups),
        )


def _with_two_axes(weight: Tensor) -> Tensor:
    return weight.unsqueeze(2) if weight.ndim == 3 else weight


def _patches(pictures: Tensor, sides: Shape, dilation: Shape, padding: Shape, stride: Shape) -> Tensor:
    """`functional.unfold`, [N, C k k, positions], in one copy: torch's own takes one picture after the other."""
    high, wide = padding
    values = functional.pad(pictures, (wide, wide, high, high)).contiguous()
    steps, width = values.stride(), zip(values.shape[2:], sides, dilation, stride, strict=True)
    places = [(size - step * (side - 1) - 1) // jump + 1 for size, side, step, jump in width]
    inner = [steps[2 + axis] * dilation[axis] for axis in (0, 1)]
    outer = [steps[2 + axis] * stride[axis] for axis in (0, 1)]
    shape = (*values.shape[:2], *sides, *places)
    return values.as_strided(shape, (*steps[:2], *inner, *outer)).flatten(4).flatten(1, 3)


def _by_group(values: Tensor, count: int, pictures: int, groups: int) -> Tensor:
    """[records x pictures, groups x width, places] to [records, groups, width, pictures x places]."""
    split = values.view(count, pictures, groups, -1, values.shape[-1])
    return split[:, 0] if pictures == 1 else split.movedim(1, 3).flatten(3)


class EmbeddingCall(Call):
    """Rows of a table by number; the setting is the number whose row is never trained."""

    def compute(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG002
        """See `Call`."""
        return functional.embedding(values, weight)

    def back(self, slopes: Tensor, values: Tensor, weight: Tensor) -> Tensor | None:  # noqa: ARG002
        """Numbers have none."""
        return None

    def part(self, uses: Sequence[Call]) -> Part:
        """See `Call`."""
        flows = []
        for use in uses:
            assert use.inputs is not None
            assert use.slopes is not None
            places, slopes = use.inputs.flatten(1), use.slopes.flatten(1, -2)
            if use.settings[0] is not None:
                slopes = slopes.masked_fill((places == use.settings[0])[..., None], 0.0)
            flows.append((places, slopes))
        places, slopes = (torch.cat(flow, 1) for flow in zip(*flows, strict=True))
        return EmbeddingRows(places, slopes, self.shape)


class UsedOtherwise(Exception):
    """These weights are also used in a way that is not tapped, and must be left to autograd."""

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self.names = names


class _Stacked(torch.autograd.Function):
    """An operation on one record, which vmap turns into `_Tapped` on the chunk.

    `lane` differs between records, so that vmap has a say even where the operation's inputs do not.
    """

    @staticmethod
    def forward(call: Call, lane: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError("only inside vmap")

    @staticmethod
    def setup_context(_ctx: Any, _inputs: Any, _output: Any) -> None:
        return

    @staticmethod
    def vmap(
        info: Any, where: tuple[Any, ...], call: Call, _lane: Tensor, values: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor, int]:
        if any(place is not None for place in where[3:]):
            raise UsedOtherwise(call.names)
        stacked = (
            values.expand(info.batch_size, *values.shape) if where[2] is None else values.movedim(where[2], 0)
        )
        found: Tensor = _Tapped.apply(call, stacked, *weights)  # type: ignore[no-untyped-call]
        return found, 0


class _Tapped(torch.autograd.Function):
    """An operation on a chunk, which keeps what its gradients are made of. Weights get no slope from it."""

    @staticmethod
    def forward(ctx: Any, call: Call, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call, call.inputs = call, values.detach()
        ctx.save_for_backward(weight)
        return call.compute(values, weight, bias)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, Tensor | None, None, None]:
        call: Call = ctx.call
        assert call.inputs is not None
        call.slopes = slopes
        (weight,) = ctx.saved_tensors
        return None, call.back(slopes, call.inputs, weight) if ctx.needs_input_grad[1] else None, None, None


class Taps(TorchFunctionMode):
    """Inside, operations with these weights are kept in `calls`; on one record of a chunk, `lane` its own number.

    names  of the weights, by their id; they require a gradient and are not stacked
    """

    def __init__(self, names: dict[int, str], lane: Tensor, calls: list[Call]) -> None:
        super().__init__()
        self._names, self._lane, self._calls = names, lane, calls

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tap = _TAPS.get(func)
        result = None if tap is None else tap(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result

    def tap(
        self,
        kind: type[Call],
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: tuple[Any, ...] = (),
    ) -> Tensor | None:
        """The outputs, kept; None where the weights are none of ours."""
        name, own_bias = self._names.get(id(weight)), self._names.get(id(bias))
        if name is None and own_bias is None:
            return None
        call = kind(name, own_bias, tuple(weight.shape), settings)
        # A weight that is computed from others (weight_norm): no slope would reach those.
        for other, own in ((weight, name), (bias, own_bias)):
            if own is None and other is not None and other.requires_grad:
                raise UsedOtherwise(call.names)
        self._calls.append(call)
        found: Tensor = _Stacked.apply(call, self._lane, values, weight, bias)  # type: ignore[no-untyped-call]
        return found


def _linear(taps: Taps, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    # Of one axis: a vector that is no batch.
    return None if values.ndim < 2 else taps.tap(LinearCall, values, weight, bias)


def _convolve(
    taps: Taps,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    axes = weight.ndim - 2
    if values.ndim != weight.ndim:
        return None
    (stride, dilation), sides = (_each(value, axes) for value in (stride, dilation)), weight.shape[2:]
    if padding == "same":
        widths = [step * (side - 1) for step, side in zip(dilation, sides, strict=True)]
        margins = [part for width in reversed(widths) for part in (width // 2, width - width // 2)]
        values, padding = functional.pad(values, margins), 0
    padding = _each(0 if padding == "valid" else padding, axes)
    if axes == 2:
        return taps.tap(ConvolutionCall, values, weight, bias, (stride, padding, dilation, groups))
    settings = ([1, *stride], [0, *padding], [1, *dilation], groups)
    found = taps.tap(ConvolutionCall, values.unsqueeze(2), weight, bias, settings)
    return None if found is None else found.squeeze(2)


def _each(value: int | Sequence[int], axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


def _embed(
    taps: Taps,
    places: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return taps.tap(EmbeddingCall, places, weight, None, (padding_idx,))


_TAPS: dict[Any, Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    torch.conv1d: _convolve,
    torch.conv2d: _convolve,
    functional.embedding: _embed,
}


def parts_of(calls: Sequence[Call]) -> dict[str, Part]:
    """The gradients in all weights that were used, by name; after the backward pass."""
    uses: dict[str, list[Call]] = {}
    biases: dict[str, Tensor] = {}
    for call in calls:
        if call.slopes is None:  # what it gave has no say in the loss
            continue
        if call.weight is not None:
            uses.setdefault(call.weight, []).append(call)
        if call.bias is not None:
            own = call.bias_gradients()
            biases[call.bias] = biases[call.bias] + own if call.bias in biases else own
    for name, some in uses.items():
        if len({type(call) for call in some}) > 1 or name in biases:
            raise UsedOtherwise({name})
    found: dict[str, Part] = {name: some[0].part(some) for name, some in uses.items()}
    return found | {name: Gradients(gradient) for name, gradient in biases.items()}

"""The same operations in forms that can be stacked: computed once for many clients, or for many samples.

`torch.func.vmap` takes most operations as they are. Some it cannot take (a GRU), takes one by one (an LSTM), or
turns into something slow (a convolution with weights of its own for each client: a grouped one), and the backward
pass of an embedding adds in any order on a GPU. Inside `stackable_operations` these are computed from products,
which can be stacked and always add in the same order; the numbers differ in rounding alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# A module as a function of its entries by name and of its inputs.
Forward = Callable[[dict[str, Tensor], Tensor], Tensor]


def as_function(module: nn.Module, *, products: bool = False) -> Forward:
    """`functional_call` of `module` with stackable operations; `products` as in `stackable_operations`.

    Where torch would leave something of a call behind in the module, a copy of it is called.
    """
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    several_names = len(list(module.modules())) < len(list(module.named_modules(remove_duplicate=False)))
    called = copy.deepcopy(module) if recurrent or several_names else module
    for part in called.modules():
        if isinstance(part, nn.RNNBase):
            # It would move the stacked weights to another place, for cuDNN.
            part.flatten_parameters = lambda: None  # type: ignore[method-assign]

    def forward(entries: dict[str, Tensor], inputs: Tensor) -> Tensor:
        if called is not module and called.training != module.training:
            called.train(module.training)
        with stackable_operations(products=products):
            logits: Tensor = functional_call(called, entries, (inputs,))
        return logits

    return forward


@contextmanager
def stackable_operations(*, products: bool = False) -> Iterator[None]:
    """Inside, recurrent layers and attention are computed in forms that can be stacked.

    With `products`, as on a GPU, so are convolutions (one product of the weights with the patches of the images) and
    embeddings (whose slope is a product too).
    """
    with sdpa_kernel(SDPBackend.MATH), _Replacements(products):
        yield


class _Replacements(TorchFunctionMode):
    """Sends calls of torch's functions to their replacements below, where these can do what is asked for."""

    def __init__(self, products: bool) -> None:
        super().__init__()
        self._table = _TABLE | _PRODUCTS if products else _TABLE

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self._table.get(func)
        result = None if replacement is None else replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


class _Rows(torch.autograd.Function):
    """weight[numbers]; the slope of the weights is a product with the indicator of each number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, numbers: Tensor) -> Tensor:
        return functional.embedding(numbers, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _output: Tensor) -> None:
        weight, numbers = inputs
        ctx.save_for_backward(numbers)
        ctx.rows = weight.shape[0]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (numbers,) = ctx.saved_tensors
        places = torch.arange(ctx.rows, device=numbers.device)
        indicator = (places[:, None] == numbers.reshape(1, -1)).to(slope.dtype)
        return indicator @ slope.reshape(-1, slope.shape[-1]), None


def _embed(
    numbers: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """As `torch.nn.functional.embedding`; None for what only that can do."""
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    rows: Tensor = _Rows.apply(weight, numbers)  # type: ignore[no-untyped-call]
    return rows


def _drop(
    values: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001
) -> Tensor | None:
    """Dropout that drops nothing, as torch cannot stack even that."""
    return values if p == 0.0 or not training else None


def _convolve(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor | None:
    """As `torch.nn.functional.conv2d`: weight [O, C k k] times the patches [C k k, N L], L places in an image.

    None for groups and dilation, which are left to torch, and for images that are not in a batch.
    """
    if groups != 1 or _pair(dilation) != (1, 1) or images.ndim != 4:
        return None
    (down, right), (high, wide) = _pair(stride), (weight.shape[2], weight.shape[3])
    if padding == "same":
        margins = [(wide - 1) // 2, wide // 2, (high - 1) // 2, high // 2]
    else:
        above, beside = (0, 0) if isinstance(padding, str) else _pair(padding)
        margins = [beside, beside, above, above]
    if any(margins):
        images = functional.pad(images, margins)
    patches: Tensor = _Patches.apply(images.transpose(0, 1), (high, wide), (down, right))  # type: ignore[no-untyped-call]
    product = weight.flatten(1) @ patches.flatten(3).flatten(0, 2)
    if bias is not None:
        product = product + bias[:, None]
    return product.view(-1, *patches.shape[3:]).transpose(0, 1)


class _Patches(torch.autograd.Function):
    """All patches of images: [C, N, H, W] to [C, k, k, N, rows, columns], as a copy."""

    @staticmethod
    def forward(images: Tensor, size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        patches = images.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1])
        return patches.permute(0, 4, 5, 1, 2, 3).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        images, ctx.size, ctx.stride = inputs
        ctx.extent = (images.shape[2], images.shape[3])

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None]:
        return _Images.apply(slopes, ctx.extent, ctx.stride), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(
        info: Any, where: tuple[int, ...], images: Tensor, size: tuple[int, int], stride: tuple[int, int]
    ) -> tuple[Tensor, int]:
        folded = images.movedim(where[0], 0).flatten(0, 1)
        patches: Tensor = _Patches.apply(folded, size, stride)  # type: ignore[no-untyped-call]
        return patches.view(info.batch_size, -1, *patches.shape[1:]), 0


class _Images(torch.autograd.Function):
    """The transpose of `_Patches`: each pixel is the sum of its places in the patches. torch cannot stack it."""

    @staticmethod
    def forward(patches: Tensor, extent: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        channels, high, wide, count, rows, _ = patches.shape
        (height, width), (down, right) = extent, stride
        places = patches.permute(0, 3, 4, 5, 1, 2)
        lines = torch.ops.aten.unfold_backward(places, (channels, count, rows, width, high), 3, wide, right)
        images: Tensor = torch.ops.aten.unfold_backward(
            lines, (channels, count, height, width), 2, high, down
        )
        return images

    @staticmethod
    def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _output: Tensor) -> None:
        return

    @staticmethod
    def vmap(
        info: Any, where: tuple[int, ...], patches: Tensor, extent: tuple[int, int], stride: tuple[int, int]
    ) -> tuple[Tensor, int]:
        folded = patches.movedim(where[0], 0).flatten(0, 1)
        images: Tensor = _Images.apply(folded, extent, stride)  # type: ignore[no-untyped-call]
        return images.view(info.batch_size, -1, *images.shape[1:]), 0


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return (pair[0], pair[-1])


# The state of a layer after one position, from its state before, what the inputs add to its gates, and the weight and
# bias of its product with the state before. An LSTM has a memory beside what it gives out; others ignore that place.
Cell = Callable[[tuple[Tensor, ...], Tensor, Tensor, "Tensor | None"], tuple[Tensor, ...]]


def gru_cell(
    state: tuple[Tensor, ...], arriving: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """A gated recurrent unit (Cho et al. 2014), with a bias in every product:

    r = sigmoid(U_r x + W_r h),  z = sigmoid(U_z x + W_z h),  n = tanh(U_n x + r * (W_n h)),  h <- (1 - z) n + z h
    """
    before = state[0]
    inner = functional.linear(before, weight, bias)
    width = before.shape[-1]
    reset, update = (arriving[..., : 2 * width] + inner[..., : 2 * width]).sigmoid().chunk(2, -1)
    new = torch.tanh(arriving[..., 2 * width :] + reset * inner[..., 2 * width :])
    return (new + update * (before - new),)


def lstm_cell(
    state: tuple[Tensor, ...], arriving: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Long short-term memory (Hochreiter and Schmidhuber 1997), with a bias in every product:

    i, f, o = sigmoid(U x + W h),  g = tanh(U_g x + W_g h),  c <- f c + i g,  h <- o tanh(c)
    """
    before, memory = state
    admit, keep, candidate, show = (arriving + functional.linear(before, weight, bias)).chunk(4, -1)
    memory = keep.sigmoid() * memory + admit.sigmoid() * candidate.tanh()
    return show.sigmoid() * memory.tanh(), memory


def _rnn_cell(squash: Callable[[Tensor], Tensor]) -> Cell:
    def cell(
        state: tuple[Tensor, ...], arriving: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        return (squash(arriving + functional.linear(state[0], weight, bias)),)

    return cell


def _recurrent(cell: Cell) -> Callable[..., Any]:
    """torch's function of the same layers, position by position; None for packed sequences and whatever draws."""

    def run(
        inputs: Tensor,
        start: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: object,
        layers: int,
        dropout: float,
        training: bool,
        both_ways: bool,
        batch_first: bool = False,
    ) -> Any:
        starts = (start,) if isinstance(start, Tensor) else tuple(start)
        directions = 2 if both_ways else 1
        own = len(weights) // (layers * directions)  # of one layer in one direction
        if not isinstance(has_biases, bool) or own not in (2, 4) or (dropout and training and layers > 1):
            return None
        values = inputs.transpose(0, 1) if batch_first else inputs
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            sides = []
            for side in range(directions):
                number = layer * directions + side
                part = weights[number * own : (number + 1) * own]
                into, inner, *biases = part
                arriving = functional.linear(values, into, biases[0] if biases else None)
                state = tuple(one[number] for one in starts)
                outputs = []
                for position in arriving.flip(0).unbind() if side else arriving.unbind():
                    state = cell(state, position, inner, biases[1] if biases else None)
                    outputs.append(state[0])
                ends.append(state)
                sides.append(torch.stack(outputs[::-1] if side else outputs))
            values = torch.cat(sides, -1) if both_ways else sides[0]
        final = tuple(torch.stack(column) for column in zip(*ends, strict=True))
        return (values.transpose(0, 1) if batch_first else values, *final)

    return run


_TABLE: dict[Any, Callable[..., Any]] = {
    functional.dropout: _drop,
    torch.gru: _recurrent(gru_cell),
    torch.lstm: _recurrent(lstm_cell),
    torch.rnn_tanh: _recurrent(_rnn_cell(torch.tanh)),
    torch.rnn_relu: _recurrent(_rnn_cell(torch.relu)),
}
_PRODUCTS: dict[Any, Callable[..., Any]] = {functional.embedding: _embed, torch.conv2d: _convolve}

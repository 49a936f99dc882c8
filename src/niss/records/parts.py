"""The gradients of a chunk of records in one parameter: norm of each, and their sum with factors.

Held as they are (`Gradients`), as the two factors of outer products, from which norms and sums follow without them
(`Products`), or as rows of a table (`EmbeddingRows`). Where the norm by products costs more than the gradient itself (a
convolution over a large picture), the gradient is computed after all (`worth_products`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]
# Products of numbers that take as long as writing a number of the gradient and reading it twice.
_TRAFFIC = 4
# Numbers that are squared and added in float32, and the length from which their squares may overflow.
_BLOCK, _SQUARED = 256, 1e18
_SMALL = 2.0**-70


class Part(Protocol):
    """The gradients of a chunk of records in one parameter."""

    def norms(self) -> Tensor:
        """Of each record, float64."""

    def some(self, records: slice) -> Part:
        """Of these records alone."""

    def total(self, factors: Tensor) -> Tensor:
        """The sum of the gradients, each times its factor."""

    def each(self) -> Tensor:
        """The gradients, [records, ...]."""

    def without(self, lost: Tensor) -> Part:
        """The same with zeros for the records that are `lost`, [records] of bool; a factor of 0 does not mend a nan."""

    @property
    def numbers(self) -> int:
        """That are held for all records."""


@dataclass(frozen=True)
class Gradients:
    """The gradients themselves, [records, ...]."""

    values: Tensor

    def norms(self) -> Tensor:
        """See `Part`."""
        return _lengths(self.values.flatten(1))

    def some(self, records: slice) -> Gradients:
        """See `Part`."""
        return Gradients(self.values[records])

    def total(self, factors: Tensor) -> Tensor:
        """See `Part`."""
        summed: Tensor = torch.tensordot(factors, self.values, dims=1)
        return summed

    def each(self) -> Tensor:
        """See `Part`."""
        return self.values

    def without(self, lost: Tensor) -> Gradients:
        """See `Part`."""
        return Gradients(_blank(self.values, lost))

    @property
    def numbers(self) -> int:
        """See `Part`."""
        return self.values.numel()


@dataclass(frozen=True)
class Products:
    """Inputs [records, groups, p, T] and slopes [records, groups, q, T] of a weight of this shape."""

    inputs: Tensor
    slopes: Tensor
    shape: Shape

    def norms(self) -> Tensor:
        """In float64 throughout: terms of both signs would leave a float32 sum without a digit."""
        if self.inputs.shape[-1] == 1:
            parts = _lengths(self.inputs.flatten(0, 1).flatten(1)) * _lengths(
                self.slopes.flatten(0, 1).flatten(1)
            )
            return _lengths(parts.view(self.inputs.shape[:2]))
        inputs, slopes = self.inputs.double(), self.slopes.double()
        grams = (inputs.mT @ inputs) * (slopes.mT @ slopes)
        return grams.sum((1, 2, 3)).clamp(min=0.0).sqrt()

    def some(self, records: slice) -> Products:
        """See `Part`."""
        return replace(self, inputs=self.inputs[records], slopes=self.slopes[records])

    def total(self, factors: Tensor) -> Tensor:
        """See `Part`."""
        # Records and positions are one axis of the product.
        slopes = (self.slopes * factors[:, None, None, None]).movedim(0, 2).flatten(2)
        return (slopes @ self.inputs.movedim(0, 2).flatten(2).mT).reshape(self.shape)

    def each(self) -> Tensor:
        """See `Part`."""
        return (self.slopes @ self.inputs.mT).reshape(-1, *self.shape)

    def without(self, lost: Tensor) -> Products:
        """See `Part`."""
        return replace(self, inputs=_blank(self.inputs, lost), slopes=_blank(self.slopes, lost))

    @property
    def numbers(self) -> int:
        """See `Part`."""
        return self.inputs.numel() + self.slopes.numel()


def worth_products(p: int, q: int, positions: int) -> bool:
    """Whether norms from inputs and slopes are less work than the gradients, q x p numbers each."""
    return positions == 1 or positions**2 * (p + q) <= _TRAFFIC * p * q


@dataclass(frozen=True)
class EmbeddingRows:
    """Numbers [records, T] of the rows of a table that were looked up, and slopes [records, T, q] in what was found."""

    places: Tensor
    slopes: Tensor
    shape: Shape

    def norms(self) -> Tensor:
        """Slopes at places with the same number are added up at the first of them."""
        first = (self.places[:, :, None] == self.places[:, None, :]).to(torch.uint8).argmax(2)
        sums = torch.zeros_like(self.slopes).scatter_add_(
            1, first[..., None].expand_as(self.slopes), self.slopes
        )
        return _lengths(sums.flatten(1))

    def some(self, records: slice) -> EmbeddingRows:
        """See `Part`."""
        return replace(self, places=self.places[records], slopes=self.slopes[records])

    def total(self, factors: Tensor) -> Tensor:
        """See `Part`."""
        found = (self.slopes * factors[:, None, None]).flatten(0, 1)
        return found.new_zeros(self.shape).index_add_(0, self.places.flatten(), found)

    def each(self) -> Tensor:
        """See `Part`."""
        places = self.places[..., None].expand_as(self.slopes)
        return self.slopes.new_zeros((len(places), *self.shape)).scatter_add_(1, places, self.slopes)

    def without(self, lost: Tensor) -> EmbeddingRows:
        """See `Part`."""
        return replace(self, slopes=_blank(self.slopes, lost))

    @property
    def numbers(self) -> int:
        """See `Part`."""
        return self.slopes.numel()


def _lengths(rows: Tensor) -> Tensor:
    """Of each row, float64, to a relative 3e-6 in float32: blocks are short, and what they give is added in float64.

    Squares overflow long before the numbers do; of rows so long that they might, it is that of a small multiple. Both
    are computed for all rows, so that time says nothing of any.
    """
    if rows.dtype == torch.float64:
        return _norm(rows)
    lengths = _in_blocks(rows)
    return torch.where(lengths > _SQUARED, _in_blocks(rows * _SMALL) / _SMALL, lengths)


def _in_blocks(rows: Tensor) -> Tensor:
    whole = rows.shape[1] // _BLOCK * _BLOCK
    blocks = rows[:, :whole].reshape(len(rows), -1, _BLOCK)
    return _norm(torch.cat([_norm(blocks), _norm(rows[:, whole:])[:, None]], 1).double())


def _norm(values: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return found


def _blank(values: Tensor, lost: Tensor) -> Tensor:
    return values.masked_fill(lost.view(-1, *[1] * (values.ndim - 1)), 0.0)

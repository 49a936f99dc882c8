"""Models of rows of categories: logistic regression on them, and matrix factorisation for ratings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning.models.one_hot import one_hot
from niss.learning.models.settings import ModelSettings
from niss.learning.samples import IdSamples

# Of the factors at the start: their products begin small beside the biases', but not at the saddle point 0.
_FACTORS = 0.1


class Categories(nn.Module):
    """Logistic regression on categories: the weights of a row's categories, one for each class, are summed.

    (sum of sizes + 1) * classes parameters.
    """

    def __init__(self, sizes: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.output = nn.Linear(sum(sizes), classes)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits [N, classes] of rows [N, columns]."""
        logits: Tensor = self.output(_marks(rows, self.sizes, self.output.weight.dtype))
        return logits


class MatrixFactorisation(nn.Module):
    """Ordered classes, such as ratings 0 .. C - 1, from a score: with categories u and v in the first two columns,

        s = b_u + b_v + sum of b over the other columns + <p_u, q_v>
        logit of class c = a_c + (c - (C - 1) / 2) s

    so that a higher score moves the chances upwards by the same odds between any two classes next to each other (the
    adjacent-categories logit model: Agresti, "Analysis of Ordinal Categorical Data", 2010). p and q have `factors`
    entries each (Koren et al., "Matrix Factorization Techniques for Recommender Systems", 2009).

    sum of sizes + (sizes[0] + sizes[1]) * factors + C parameters.
    """

    def __init__(self, sizes: tuple[int, ...], classes: int, factors: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.biases = nn.Linear(sum(sizes), 1, bias=False)
        self.left = nn.Linear(sizes[0], factors, bias=False)
        self.right = nn.Linear(sizes[1], factors, bias=False)
        self.levels = nn.Parameter(torch.zeros(classes))
        nn.init.zeros_(self.biases.weight)
        for table in (self.left, self.right):
            nn.init.normal_(table.weight, std=_FACTORS)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits [N, classes] of rows [N, columns]."""
        marks = _marks(rows, self.sizes, self.levels.dtype)
        first, second = self.sizes[:2]
        left, right = self.left(marks[:, :first]), self.right(marks[:, first : first + second])
        score = self.biases(marks) + (left * right).sum(1, keepdim=True)
        classes = len(self.levels)
        steps = torch.arange(classes, dtype=score.dtype, device=score.device) - (classes - 1) / 2
        logits: Tensor = self.levels + steps * score
        return logits


def build_factorisation(samples: IdSamples, classes: int, settings: ModelSettings) -> MatrixFactorisation:
    if len(samples.sizes) < 2:
        raise ConfigError(
            f"'mf' needs at least two columns of categories, not {len(samples.sizes)}",
            field="model.name",
            hint="use model.name = 'logistic'",
        )
    return MatrixFactorisation(samples.sizes, classes, settings.factors or 8)


def _marks(rows: Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Each column as `one_hot`, side by side: [N, sum of sizes]."""
    columns = zip(rows.unbind(1), sizes, strict=True)
    return torch.cat([one_hot(column, size, dtype) for column, size in columns], dim=1)

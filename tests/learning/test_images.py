from __future__ import annotations

import numpy as np
import pytest
import torch

from niss.errors import ConfigError
from niss.learning import to_tensor
from niss.randomness import SimStream

IMAGES = SimStream(2).generator().integers(0, 256, size=(3, 2, 4, 5), dtype=np.uint8)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_normalises_each_channel(dtype: torch.dtype, tolerance: float) -> None:
    result = to_tensor(IMAGES, [0.5, 0.25], (0.5, 2.0), dtype)
    expected = IMAGES.astype(np.float64) / 255
    expected[:, 0] = (expected[:, 0] - 0.5) / 0.5
    expected[:, 1] = (expected[:, 1] - 0.25) / 2.0
    assert result.dtype == dtype
    assert result.shape == (3, 2, 4, 5)
    assert float(np.abs(result.double().numpy() - expected).max()) <= tolerance


def test_one_number_serves_all_channels() -> None:
    assert torch.equal(to_tensor(IMAGES, 0.1, 0.3), to_tensor(IMAGES, [0.1, 0.1], [0.3, 0.3]))


def test_read_only_and_strided_arrays_are_read_without_being_changed() -> None:
    frozen = IMAGES.copy()
    frozen.flags.writeable = False
    assert torch.equal(to_tensor(frozen, 0.0, 1.0), to_tensor(IMAGES, 0.0, 1.0))
    assert torch.equal(
        to_tensor(IMAGES[::-1, :, :, ::2], 0.0, 1.0), to_tensor(IMAGES, 0.0, 1.0).flip(0)[..., ::2]
    )
    assert to_tensor(IMAGES.transpose(0, 1, 3, 2), 0.0, 1.0).is_contiguous()
    assert np.array_equal(frozen, IMAGES)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"images": IMAGES.astype(np.float32)}, "images", "uint8 array, not float32"),
        ({"images": torch.zeros(1, 2, 4, 5, dtype=torch.uint8)}, "images", "not Tensor"),
        ({"images": IMAGES[:, 0]}, "images", r"\[N, C, H, W\]"),
        ({"mean": [0.0, 0.0, 0.0]}, "mean", "one number or 2"),
        ({"mean": float("nan")}, "mean", "finite"),
        ({"mean": "grey"}, "mean", "must be a number"),
        ({"std": 0.0}, "std", "above 0"),
        ({"std": [1.0, -1.0]}, "std", "above 0"),
        ({"dtype": torch.float16}, "dtype", "float32 or torch.float64"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, object], field: str, message: str) -> None:
    arguments: dict[str, object] = {"images": IMAGES, "mean": 0.0, "std": 1.0}
    with pytest.raises(ConfigError, match=message) as caught:
        to_tensor(**(arguments | changes))  # type: ignore[arg-type]
    assert caught.value.field == field

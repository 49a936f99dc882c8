"""A model that is a list of two arrays, one of them in Fortran's order, and single precision."""

import numpy as np


def get_dummy_model() -> list[np.ndarray]:
    return [np.ones((4, 3), order="F"), np.ones((1, 1), dtype=np.float32)]

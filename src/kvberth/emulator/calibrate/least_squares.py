"""Least squares for times: robust against stalls, and without negative costs. Knows nothing of engines.

Huber's weights make what is far off count less, by iterating; the scale is taken from the median residual. Negative
figures are avoided by leaving out the most negative column until there is none (the idea of Lawson and Hanson's NNLS,
in a form that is enough for three columns).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Solution", "solve"]

Floats = npt.NDArray[np.float64]

_HUBER = 1.345
"""In standard deviations; 95% efficient if the noise is Gaussian after all."""
_ROUNDS = 30
_LEAST_SCALE = 1e-9
"""Of the residual, in seconds: no clock is better, and 0 would divide."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The outcome.

    Attributes:
        values: of shape (columns,).
        standard_errors: of shape (columns,), and rough, since neighbouring rows share their noise; NaN for a column
            that was left out.
        residual: target less model, of shape (rows,).
    """

    values: Floats
    standard_errors: Floats
    residual: Floats


def solve(
    columns: Floats, target: Floats, *, precision: Floats, share: Floats, signed: tuple[int, ...] = ()
) -> Solution:
    """The values whose sum of columns is nearest to `target`.

    Args:
        columns: of shape (rows, columns).
        precision: of each row, inverse to the variance of its noise.
        share: of each row, how much of an observation it is: what n rows have seen of one event counts 1 / n each.
        signed: columns whose value may be negative.
    """
    trust = np.ones_like(target)
    for _ in range(_ROUNDS):
        weights = precision * share * trust
        values = _solve_once(columns, target, weights, signed)
        residual = target - columns @ values
        standing = np.abs(residual) * np.sqrt(precision)
        limit = _HUBER * max(1.4826 * float(np.median(standing)), _LEAST_SCALE)
        trust = np.minimum(1.0, limit / np.maximum(standing, _LEAST_SCALE))
    return Solution(values, _standard_errors(columns, values, residual, weights, share), residual)


def _solve_once(columns: Floats, target: Floats, weights: Floats, signed: tuple[int, ...]) -> Floats:
    roots = np.sqrt(weights)
    size = np.maximum(np.linalg.norm(columns * roots[:, None], axis=0), np.finfo(float).tiny)
    scaled = columns * roots[:, None] / size
    used = list(range(columns.shape[1]))
    while True:
        values = np.zeros(columns.shape[1])
        values[used] = np.linalg.lstsq(scaled[:, used], target * roots, rcond=None)[0]
        negative = [index for index in used if values[index] < 0 and index not in signed]
        if not negative:
            return np.asarray(values / size)
        used.remove(min(negative, key=lambda index: values[index]))


def _standard_errors(columns: Floats, values: Floats, residual: Floats, weights: Floats, share: Floats) -> Floats:
    used = np.flatnonzero(values)
    design = columns[:, used] * np.sqrt(weights)[:, None]
    size = np.linalg.norm(design, axis=0)
    freedom = max(float(share.sum()) - len(used), 1.0)
    variance = float(np.sum(weights * residual**2)) / freedom
    inverse = np.linalg.pinv((design / size).T @ (design / size))
    errors = np.full(columns.shape[1], np.nan)
    errors[used] = np.sqrt(variance * np.maximum(np.diag(inverse), 0.0)) / size
    return errors

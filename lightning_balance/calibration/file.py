"""The file that `lightning-balance calibrate` writes and ``cost="cost.yaml"`` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_balance.calibration.fit import CostFit
from lightning_balance.cost import CostModel
from lightning_balance.outputs import write_file

FILE_VERSION = 1
SUFFIXES = (".yaml", ".yml")


def is_cost_path(path: str | os.PathLike[str]) -> bool:
    """Whether ``cost`` means a file, by its suffix.

    >>> is_cost_path("COST.YAML"), is_cost_path("my_project.cost")
    (True, False)
    """
    return Path(path).suffix.lower() in SUFFIXES


def check_is_cost_path(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse a file that ``BalanceCallback(cost=...)`` would not take for one.

    Raises:
        ValueError: the name has another suffix.

    >>> check_is_cost_path("out", "cost.yaml")
    """
    if not is_cost_path(path):
        raise ValueError(
            f"{name} must end in {' or '.join(SUFFIXES)}, by which BalanceCallback(cost=...) knows the file, got"
            f" {os.fspath(path)!r}"
        )


def write_cost_file(path: str | os.PathLike[str], fit: CostFit, measured_on: Mapping[str, Any]) -> None:
    """Write a fit; the same measurements give the same file.

    Args:
        path: the file, replaced in one step if it exists.
        fit: what was measured and fitted.
        measured_on: plain values that say on what: device, ranks, versions.
    """
    import yaml  # a dependency of lightning

    content = {
        "version": FILE_VERSION,
        "intercept": float(fit.model.intercept),
        "alpha": float(fit.model.alpha),
        "seconds_per_token": float(fit.seconds_per_token),
        "fit": {
            "median_error": round(fit.median_error, 4),
            "worst_error": round(fit.worst_error, 4),
            "r_squared": round(fit.r_squared, 6),
            "noise": round(fit.noise, 4),
            "num_repeats": int(fit.repeats.shape[1]),
        },
        "measured_on": dict(measured_on),
        "points": [
            {"num_samples": point.num_samples, "padded_length": point.padded_length, "seconds": float(f"{seconds:.6g}")}
            for point, seconds in zip(fit.points, fit.seconds.tolist(), strict=True)
        ],
    }
    head = (
        "# Written by `lightning-balance calibrate`, read by BalanceCallback(cost='FILE'):\n"
        "# seconds = seconds_per_token * (intercept + n*L + alpha*n*L^2) for n samples padded to L tokens.\n"
    )
    write_file(Path(path), head + yaml.safe_dump(content, sort_keys=False))


def read_cost_file(path: str | os.PathLike[str]) -> CostModel:
    """Read the cost model of a file that `lightning-balance calibrate` wrote, or any with ``intercept`` and ``alpha``.

    Raises:
        ValueError: there is no such file, or it does not hold a cost model.
    """
    import yaml

    target = Path(path)
    if not target.is_file():
        raise ValueError(
            f"cost={str(path)!r} is no file (looked for {target.absolute()}): write it with `lightning-balance"
            " calibrate`, or give its full path"
        )
    try:
        content = yaml.safe_load(target.read_text())
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also no text, too many digits, too deep
        raise ValueError(f"cost={str(path)!r} is not a YAML file of a cost model: {error}") from error
    if not isinstance(content, dict) or not {"intercept", "alpha"} <= content.keys():
        raise ValueError(
            f"cost={str(path)!r} must hold intercept and alpha, as `lightning-balance calibrate` writes it"
        )
    if content.get("version", FILE_VERSION) != FILE_VERSION:
        raise ValueError(
            f"cost={str(path)!r} has version {content['version']!r}, but this release reads version {FILE_VERSION}:"
            " calibrate again"
        )
    try:
        return CostModel(intercept=_number(content["intercept"]), alpha=_number(content["alpha"]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"cost={str(path)!r}: {error}") from error


def _number(value: Any) -> Any:
    """What YAML read; it takes ``1e-4`` for a text, for want of a point."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value  # the model says what is wrong with it

"""The file that `lightning-balance calibrate` writes and ``cost="cost.yaml"`` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_balance.calibration.fit import CostFit
from lightning_balance.cost import CostModel

FILE_VERSION = 1
SUFFIXES = (".yaml", ".yml")


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
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(head + yaml.safe_dump(content, sort_keys=False))
    partial.replace(target)


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
    except yaml.YAMLError as error:
        raise ValueError(f"cost={str(path)!r} is not a YAML file: {error}") from error
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
        return CostModel(intercept=content["intercept"], alpha=content["alpha"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"cost={str(path)!r}: {error}") from error

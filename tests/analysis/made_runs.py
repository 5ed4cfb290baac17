"""Run folders as small files, with numbers that are known."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flsuite.runs.table import MetricsTable

__all__ = ["Row", "made_grid", "made_run", "settings"]

Row = tuple[str, str, str, list[float]]
"""Scope, split, metric, and a value per round."""


def settings(method: str, seed: int, alpha: float = 0.3, **others: Any) -> dict[str, Any]:
    """Return the settings of a run, in the form in which a run writes them."""
    partition = _made("data.Dirichlet", alpha=alpha, min_samples=1)
    return {
        "seed": seed,
        "monitor": "accuracy",
        "model": _made("models.Classifier", lr=0.1),
        "data": _made("data.Digits", clients=2, partition=partition),
        "aggregator": _made(f"aggregators.{method}"),
        "schedule": _made("schedules.Synchronous"),
        "callbacks": [],
        **others,
    }


def made_run(folder: Path, content: dict[str, Any], rows: Iterable[Row]) -> Path:
    """Write a run. Round n ends at 2 n virtual and 3 n other seconds, 4 n updates, 5 n MB."""
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    config = {"seed_everything": content["seed"], "trainer": {"rounds": 3}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    table = [
        (n, 2.0 * n, 3.0 * n, 4 * n, 5_000_000 * n, scope, split, metric, value)
        for scope, split, metric, values in rows
        for n, value in enumerate(values, start=1)
    ]
    pd.DataFrame(table, columns=list(MetricsTable.columns)).to_csv(
        folder / "metrics.csv", index=False
    )
    (folder / "partition.csv").write_text(
        "client,split,class,samples\n0,train,cat,30\n0,train,dog,10\n1,train,cat,0\n1,train,dog,40\n"
    )
    return folder


def made_grid(
    root: Path,
    methods: tuple[str, ...] = ("FedAvg", "LocalOnly"),
    alphas: tuple[float, ...] = (0.05, 0.3),
    seeds: tuple[int, ...] = (1, 2, 3),
) -> Path:
    """Write runs of two clients and three rounds.

    The global test accuracy of round n is ``n / 10 + seed / 100``, and 0.2 more for the first
    method. Client c has 0.1 c more than that. The difference of two methods has a tiny spread.
    """
    for number, method in enumerate(methods):
        for alpha in alphas:
            for seed in seeds:
                bonus = (0.0 if number else 0.2) + number * seed * 1e-9
                scores = [n / 10 + seed / 100 + bonus for n in (1, 2, 3)]
                rows: list[Row] = [
                    (scope, split, "accuracy", [score + more for score in scores])
                    for split in ("val", "test")
                    for scope, more in (("global", 0.0), ("0", 0.0), ("1", 0.1))
                ]
                rows.append(("global", "test", "loss", [1 - score for score in scores]))
                gamma = [(f"gamma{part}", 1 + seed) for part in ("", "_relative", "_orig")]
                rows += [
                    ("global", "train", name, [top / n for n in (1, 2, 3)]) for name, top in gamma
                ]
                folder = root / f"{method}-{alpha}" / f"seed-{seed}"
                made_run(folder, settings(method, seed, alpha), rows)
    return root


def _made(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"flsuite.{name}", "init_args": arguments}

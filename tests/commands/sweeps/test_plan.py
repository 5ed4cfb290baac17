"""Which runs a sweep consists of, and when a cell stays the same one."""

from dataclasses import replace
from pathlib import Path

import pytest

from flsuite.commands.sweeps.plan import (
    cell,
    fit_arguments,
    grid_points,
    require_distinct,
    samples_of,
)
from flsuite.commands.sweeps.reading import Sweep, Tuning
from flsuite.common.errors import FlsuiteError

BASE = {
    "seed_everything": 1,
    "data": {"class_path": "Digits", "init_args": {"clients": 3}},
    "trainer": {"rounds": 2, "engine": {"class_path": "InProcess"}, "logger": False},
}
SWEEP = Sweep(
    name="s",
    config=Path("base.yaml"),
    base=BASE,
    seeds=(1, 2),
    methods={
        "FedAvg": {},
        "FedProx": {"trainer.aggregator.mu": 0.1, "trainer.aggregator": "FedProx"},
    },
    grid={"data.partition.alpha": [0.1, 1.0], "data.clients": [3, 4]},
)


def folder(sweep: Sweep, method: str = "FedProx") -> Path:
    return cell(sweep, method, {}, grid_points(sweep)[0], sweep.seeds[0], False).folder


def changed(**trainer: object) -> Sweep:
    return replace(SWEEP, base={**BASE, "trainer": {**BASE["trainer"], **trainer}})  # type: ignore[dict-item]


def test_the_grid_is_the_product_of_its_values() -> None:
    points = [tuple(point.values()) for point in grid_points(SWEEP)]
    assert points == [(0.1, 3), (0.1, 4), (1.0, 3), (1.0, 4)]
    assert grid_points(replace(SWEEP, grid={})) == [{}]


def test_a_class_comes_before_its_arguments_whatever_the_order_in_the_file() -> None:
    arguments = fit_arguments(SWEEP, samples_of(SWEEP)[-1], Path("f"))
    assert arguments[:4] == ["--config", "base.yaml", "--seed_everything", "1"]
    first = arguments.index("--trainer.aggregator=FedProx")
    assert first < arguments.index("--trainer.aggregator.mu=0.1")


def test_one_method_trains_and_the_others_merge_its_models() -> None:
    sweep = replace(SWEEP, updates_from="FedAvg")
    cells = [c for c in samples_of(sweep) if c.overrides["data.clients"] == 3]
    assert len({c.method for c in cells}) > 1
    for c in cells:
        arguments = fit_arguments(sweep, c, Path("f"))
        trains = c.method == "FedAvg"
        assert f"--trainer.keep_updates={'true' if trains else 'false'}" in arguments
        # Without kept models, an earlier cell is another one. What others merged is the same.
        assert (c in samples_of(SWEEP)) is not trains
        sources = [a for a in arguments if a.startswith("--trainer.from_updates=")]
        assert len(sources) == (0 if trains else 1)
        if c.source:
            assert c.source.seed == c.seed and c.source.point == c.point
            assert sources == [f"--trainer.from_updates={Path('f', c.source.folder)}"]


def test_folders_can_be_read() -> None:
    name = folder(SWEEP).parent.name
    assert name.startswith("FedProx-alpha=0.1-clients=3-") and folder(SWEEP).name == "seed-1"
    partition = {"class_path": "flsuite.data.Dirichlet", "init_args": {"alpha": 0.1}}
    name = folder(replace(SWEEP, grid={"data.partition": [partition]})).parent.name
    assert name.startswith("FedProx-partition=Dirichlet-alpha=0.1-")
    slashes = folder(replace(SWEEP, grid={"data.root": ["/a/../b c"]})).parts
    assert len(slashes) == 2 and ".." not in slashes


def test_the_name_of_a_folder_is_not_cut_inside_a_number() -> None:
    grid = {f"trainer.aggregator.rate_{n}": [0.0125] for n in range(9)}
    name = folder(replace(SWEEP, grid=grid)).parent.name
    shown = "-".join(f"rate_{n}=0.0125" for n in range(5))
    assert name.startswith(f"FedProx-{shown}-") and len(name) == len(f"FedProx-{shown}-") + 8


def test_a_cell_is_another_one_if_anything_changes_that_decides_its_result() -> None:
    same = folder(SWEEP)
    assert folder(changed(rounds=3)) != same
    assert folder(replace(SWEEP, shared={"trainer.rounds": 3})) != same
    other = {**SWEEP.methods, "FedProx": {"trainer.aggregator.mu": 0.2}}
    assert folder(replace(SWEEP, methods=other)) != same


def test_a_cell_stays_the_same_one_if_nothing_changes_that_decides_its_result() -> None:
    same = folder(SWEEP)
    engine = {"class_path": "Processes", "init_args": {"workers": 2}}
    assert folder(changed(engine=engine, logger=True)) == same
    assert folder(replace(SWEEP, shared={"trainer.engine.threads": 1})) == same
    assert folder(replace(SWEEP, base={**BASE, "seed_everything": 7})) == same
    assert folder(replace(SWEEP, seeds=(1, 2, 3), workers=2, config=Path("b.yaml"))) == same
    more = {**SWEEP.grid, "data.partition.alpha": [0.1, 1.0, 10.0]}
    assert folder(replace(SWEEP, grid=more)) == same


def test_a_method_that_varies_the_engine_has_cells_of_its_own() -> None:
    sweep = replace(SWEEP, grid={"trainer.engine.threads": [1, 2]})
    cells = {cell(sweep, "FedAvg", {}, point, 1, False).folder for point in grid_points(sweep)}
    assert len(cells) == 2


def test_samples_have_each_value_once() -> None:
    tuning = Tuning(3, (9,), 0, {"FedAvg": {}, "FedProx": {"trainer.aggregator.mu": [0.5, 0.7]}})
    samples = samples_of(replace(SWEEP, tuning=tuning))
    values = [item for sample in samples for item in sample.overrides.items()]
    assert {0.1, 1.0} == {v for k, v in values if k == "data.partition.alpha"}
    assert {3, 4} == {v for k, v in values if k == "data.clients"}
    assert {0.5, 0.7} == {v for k, v in values if k == "trainer.aggregator.mu"}
    assert [sample.method for sample in samples] == ["FedAvg"] * 4 + ["FedProx"] * 4
    assert len({sample.folder.parent for sample in samples}) == 8, "every method at every point"

    many = [0.1 * n for n in range(1, 100)]
    large = samples_of(replace(SWEEP, grid={"data.partition.alpha": many, "data.clients": [3, 4]}))
    assert len(large) == 2 * 99
    for name in SWEEP.methods:
        values = [own.overrides for own in large if own.method == name]
        assert {own["data.clients"] for own in values} == {3, 4}
        assert {own["data.partition.alpha"] for own in values} == set(many)


def test_changes_of_the_trials_stay_out_of_the_results() -> None:
    tuning = Tuning(1, (9,), 0, {"FedAvg": {}, "FedProx": {}}, {"trainer.rounds": 1})
    short = replace(SWEEP, tuning=tuning)
    point = grid_points(SWEEP)[0]
    trial, result = (cell(short, "FedAvg", {}, point, 9, is_trial) for is_trial in (True, False))
    assert trial.overrides == {**result.overrides, "trainer.rounds": 1}
    assert result == cell(SWEEP, "FedAvg", {}, point, 9, False)
    assert trial.folder != cell(SWEEP, "FedAvg", {}, point, 9, True).folder


def test_two_methods_that_are_the_same_experiment_are_refused() -> None:
    require_distinct(SWEEP)
    twice = replace(SWEEP, methods={**SWEEP.methods, "copy": dict(SWEEP.methods["FedProx"])})
    with pytest.raises(FlsuiteError, match="FedProx and copy are the same"):
        require_distinct(twice)

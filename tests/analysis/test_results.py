"""Many runs as one table, and the figures that take it."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from flsuite.analysis import (
    Results,
    client_gains,
    clients_figure,
    confusion_figure,
    confusion_matrix,
    curves_figure,
    find_runs,
    flow_figure,
    forgetting_figure,
    gain_figure,
    gamma_figure,
    group_runs,
    label_skew,
    load,
    partitions_figure,
    target_figure,
    target_table,
)
from flsuite.analysis.groups import Flat, Variation, flatten, label_of, method_of
from flsuite.common.errors import FlsuiteError
from flsuite.runs.table import MetricsTable
from tests.analysis.made_runs import made_grid, made_run, settings

SHARP, MILD = "Dirichlet(alpha=0.05)", "Dirichlet(alpha=0.3)"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load(made_grid(tmp_path_factory.mktemp("results")))


def drawn(figure: Figure) -> list[float]:
    """Return the heights of all lines of a figure, once it could be drawn."""
    figure.draw_without_rendering()
    return [float(y) for panel in figure.axes for line in panel.lines for y in line.get_ydata()]


def test_the_table_is_tidy(results: Results) -> None:
    assert list(results.columns) == ["run", "method", "partition", "seed", *MetricsTable.columns]
    assert len(results) == 2 * 2 * 3 * 3 * (2 * 3 + 1 + 3)
    assert set(results["method"]) == {"FedAvg", "LocalOnly"}
    assert set(results["partition"]) == {SHARP, MILD}
    words = ["run", "method", "partition", "scope", "split", "metric"]
    assert all(isinstance(results[name].dtype, pd.CategoricalDtype) for name in words)
    row = results.query(
        "method == 'FedAvg' and seed == 2 and scope == '1' and split == 'test' and round == 3"
    )
    assert row["value"].tolist() == pytest.approx([0.62, 0.62])
    assert set(row["bytes"]) == {15_000_000} and set(row["wall_s"]) == {9.0}


def test_wide_has_a_column_per_number(results: Results) -> None:
    wide = results[results["round"] == 2].wide()
    assert len(wide) == 2 * 2 * 3 * 3, "runs x (global and two clients)"
    own = wide[(wide["method"] == "FedAvg") & (wide["partition"] == MILD) & (wide["seed"] == 3)]
    by_scope = own.set_index("scope")
    assert by_scope.loc["global", "test/accuracy"] == pytest.approx(0.43)
    assert by_scope.loc["global", "test/loss"] == pytest.approx(0.57)
    assert by_scope.loc["1", "val/accuracy"] == pytest.approx(0.53)
    assert np.isnan(by_scope.loc["1", "test/loss"]) and by_scope.loc["0", "virtual_s"] == 4


def test_a_method_is_named_by_what_differs(tmp_path: Path) -> None:
    rows = [("global", "test", "accuracy", [0.5])]
    for name, rounds in (("a", 3), ("b", 9)):
        made_run(tmp_path / name, settings("FedAvg", 1, rounds=rounds), rows)
    assert set(load(tmp_path)["method"]) == {"FedAvg, rounds=3", "FedAvg, rounds=9"}
    assert set(load(tmp_path / "a")["method"]) == {"FedAvg"}
    assert set(load(tmp_path / "a", tmp_path / "b")["partition"]) == {MILD}


def test_the_default_monitor_of_personal_models_is_no_difference(tmp_path: Path) -> None:
    for method, monitor in (("FedAvg", "accuracy"), ("LocalOnly", "accuracy_client_mean")):
        rows = [("global", "test", monitor, [0.5])]
        made_run(tmp_path / method, settings(method, 1, monitor=monitor), rows)
    assert set(load(tmp_path)["method"]) == {"FedAvg", "LocalOnly"}


def test_a_sweep_names_methods_and_its_trials_are_no_results(tmp_path: Path) -> None:
    """Tuned values differ from grid point to grid point, and the method is still one."""
    rows = [("global", "test", "accuracy", [0.5])]
    for alpha, mu in ((0.05, 0.1), (0.3, 1.0)):
        cell = f"prox-tuned-alpha={alpha}-0a1b2c3d/seed-1"
        made_run(tmp_path / cell, settings("FedProx", 1, alpha, mu=mu), rows)
        made_run(tmp_path / "tuning" / cell, settings("FedProx", 101, alpha, mu=mu), rows)
    (tmp_path / "tuning.csv").write_text("method,grid point,trial,values,score,chosen\n")
    found = load(tmp_path)
    assert set(found["method"]) == {"prox-tuned"} and set(found["partition"]) == {SHARP, MILD}
    assert set(found["seed"]) == {1}
    labels = [group.label for group in group_runs(find_runs([tmp_path]))]
    assert labels == ["prox-tuned, alpha=0.05", "prox-tuned, alpha=0.3"]


# Figures


def test_curves_are_means_in_a_band_by_partition(results: Results) -> None:
    figure = curves_figure(results, ["accuracy"], target=0.45)
    assert [panel.get_title() for panel in figure.axes] == [SHARP, MILD]
    panel = figure.axes[1]
    first, second, target = panel.lines
    assert list(first.get_ydata()) == pytest.approx([0.32, 0.42, 0.52])
    assert list(second.get_ydata()) == pytest.approx([0.12, 0.22, 0.32])
    assert set(target.get_ydata()) == {0.45} and len(panel.collections) == 2
    by_bytes = curves_figure(results, ["accuracy"], x="bytes").axes[0]
    assert list(by_bytes.lines[0].get_xdata()) == [5, 10, 15]
    assert by_bytes.get_xlabel() == "MB sent and received"


def test_partitions_go_by_their_numbers_and_the_legend_has_every_line(tmp_path: Path) -> None:
    methods = tuple(f"Method{number}" for number in range(12))
    figure = curves_figure(load(made_grid(tmp_path, methods, (3, 10), (1,))), ["accuracy"])
    figure.draw_without_rendering()
    assert [panel.get_title()[-4:] for panel in figure.axes] == ["a=3)", "=10)"]
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == set(methods)
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 12 and figure.axes[0].get_position().height > 0.3


def test_a_score_that_no_run_has_is_named(results: Results) -> None:
    with pytest.raises(FlsuiteError, match="the global test score 'f1'"):
        curves_figure(results, ["f1"])
    with pytest.raises(FlsuiteError, match="the client val score 'loss'"):
        clients_figure(results, "loss", "val")
    with pytest.raises(FlsuiteError, match="this DataFrame lacks the columns run, method"):
        curves_figure(pd.DataFrame({"value": [1]}))


def test_gains_by_hand(results: Results) -> None:
    gains = client_gains(results)
    assert len(gains) == 2 * 3 * 2 and set(gains["method"]) == {"FedAvg"}
    assert gains["gain"].to_numpy() == pytest.approx(np.full(12, 0.2))
    one = gains.query("partition == @MILD and seed == 3 and client == 1").iloc[0]
    assert (one["alone"], one["score"]) == pytest.approx((0.43, 0.63))
    panel = gain_figure(results).axes[0]
    assert panel.get_title() == "FedAvg: +0.200 on average, 100% gain"


def test_gains_need_a_method_to_compare_with(results: Results) -> None:
    with pytest.raises(FlsuiteError, match=r"'Alone' .* are FedAvg, LocalOnly"):
        gain_figure(results, over="Alone")
    apart = results[(results["method"] == "FedAvg") ^ (results["seed"] == 1)]
    with pytest.raises(FlsuiteError, match="run both with the same seeds"):
        gain_figure(apart)


def test_partitions_and_their_skew(results: Results) -> None:
    # 70 % cats and 30 % dogs against 0 % and 100 %, with 37.5 % and 62.5 % overall.
    counts = pd.DataFrame({"cat": [30, 0], "dog": [10, 40]})
    assert label_skew(counts) == pytest.approx(((0.75 - 0.375) + 0.375) / 2)
    assert label_skew(pd.DataFrame({"cat": [3, 6], "dog": [1, 2]})) == 0
    figure = partitions_figure(results)
    assert [panel.get_title() for panel in figure.axes] == [
        f"{name}: label skew 0.38" for name in (SHARP, MILD)
    ]
    assert [bar.get_height() for bar in figure.axes[0].patches] == [30, 0, 10, 40]


def test_gamma_has_a_panel_per_part(results: Results) -> None:
    figure = gamma_figure(results[results["partition"] == MILD])
    assert [panel.get_ylabel() for panel in figure.axes] == [
        "gamma",
        "gamma / ||mean gradient||²",
        "gamma at the plain input",
    ]
    assert drawn(figure)[:3] == pytest.approx([3, 1.5, 1])
    with pytest.raises(FlsuiteError, match="add the callback GradientDissimilarity"):
        gamma_figure(results[results["split"] == "test"])


def test_the_way_to_a_target_on_every_axis(results: Results) -> None:
    table = target_table(results, 0.42).set_index(["method", "partition"])
    row = table.loc["FedAvg", MILD]
    # Seed 1 has 0.41 in round 2 and needs a third one, seeds 2 and 3 have 0.42 and 0.43.
    assert (row["runs"], row["reached"]) == (3, 3)
    assert row["round"] == pytest.approx(7 / 3) and row["wall_s"] == pytest.approx(7)
    assert row["virtual_s_std"] == pytest.approx(2 / 3**0.5)
    assert row["bytes"] == pytest.approx(35e6 / 3) and row["client_updates"] == pytest.approx(
        28 / 3
    )
    assert table.loc["LocalOnly", SHARP]["reached"] == 0

    panel = target_figure(results, 0.52, x="bytes").axes[0]
    texts = {text.get_text() for text in panel.texts}
    assert texts == {"not reached in 1 of 3", "not reached in 3 of 3"}
    assert (
        panel.get_xlabel()
        == "MB sent and received to test accuracy 0.52, of the runs that reach it"
    )


def test_confusion_counts_the_predictions(tmp_path: Path) -> None:
    for seed, last in ((1, 0), (2, 1)):
        folder = made_run(tmp_path / str(seed), settings("FedAvg", seed), [ONE_SCORE])
        lines = ["sample,target,prediction,p_0,p_1", "0,0,0,1,0", "1,0,1,0,1", f"2,1,{last},1,0"]
        (folder / "predictions.csv").write_text("\n".join(lines) + "\n")
    assert confusion_matrix(tmp_path / "1").to_dict() == {
        "cat": {"cat": 1, "dog": 1},
        "dog": {"cat": 1, "dog": 0},
    }
    panel = confusion_figure(load(tmp_path)).axes[0]
    assert [text.get_text() for text in panel.texts] == ["0.50"] * 4

    (tmp_path / "2" / "predictions.csv").unlink()
    with pytest.raises(FlsuiteError, match=r"predict --config .*/2/config\.yaml"):
        confusion_figure(load(tmp_path))
    (tmp_path / "2" / "predictions.csv").write_text(
        "sample,target,prediction,p_0,p_1\n0,0 1,0,1,1\n"
    )
    with pytest.raises(FlsuiteError, match="several labels or none"):
        confusion_matrix(tmp_path / "2")


ONE_SCORE = ("global", "test", "accuracy", [0.5])


def test_forgetting_has_a_row_per_task_done(results: Results, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a", settings("FedAvg", 1), [ONE_SCORE])
    matrix = [[0.9, 0.1], [0.4, 0.8]]
    with (folder / "metrics.csv").open("a") as file:
        for task, row in enumerate(matrix):
            for other, value in enumerate(row):
                file.write(f"{5 * task + 5},0,0,0,0,global,test,task_accuracy/{other},{value}\n")
                file.write(f"{5 * task + 5},0,0,0,0,0,test,task_accuracy/{other},0\n")
    panel = forgetting_figure(load(tmp_path)).axes[0]
    assert np.asarray(panel.images[0].get_array()) == pytest.approx(np.array(matrix))
    with pytest.raises(FlsuiteError, match="no run has accuracies by task"):
        forgetting_figure(results)


def test_samples_of_a_flow_lie_in_the_plane_of_the_features() -> None:
    rng = np.random.default_rng(0)
    features, y = rng.normal(size=(40, 5)), np.arange(40) % 2
    figure = flow_figure(features, y, features, y, ["cat", "dog"])
    left, right = (
        np.concatenate([dots.get_offsets() for dots in panel.collections]) for panel in figure.axes
    )
    assert np.allclose(left, right)


def test_wrong_requests_of_figures_are_one_line(results: Results) -> None:
    with pytest.raises(FlsuiteError, match="the table has no rows"):
        curves_figure(results[results["seed"] == 99])
    with pytest.raises(FlsuiteError, match="target must be a number, got 'accuracy'"):
        target_figure(results, "accuracy", 0.7)  # type: ignore[arg-type]


def test_a_method_is_named_with_the_parts_that_it_was_given() -> None:
    def chosen(name: str, **parts: str) -> Flat:
        given = {part: {"class_path": f"flsuite.aggregators.{p}"} for part, p in parts.items()}
        aggregator = {"class_path": f"flsuite.aggregators.{name}", "init_args": given}
        return dict(flatten({"aggregator": aggregator, "seed": 1}))

    plain, mixed = chosen("FedAvg", rule="Mean"), chosen("FedAvg", rule="Krum")
    adam = chosen("FedAdam", rule="TrimmedMean", objective="Proximal")
    variation = Variation([plain, adam])
    assert label_of(plain, variation) == "FedAvg"
    assert label_of(adam, variation) == "FedAdam + TrimmedMean + Proximal"
    assert method_of(mixed, Variation([mixed, adam])) == "FedAvg + Krum"
    assert method_of(mixed, Variation([plain, mixed])) == "FedAvg, Krum"


def test_a_place_that_does_not_exist_is_named_next_to_one_with_runs(tmp_path: Path) -> None:
    made_run(tmp_path / "a", settings("FedAvg", 1), [("global", "test", "accuracy", [0.5])])
    with pytest.raises(FlsuiteError, match=r"there is no folder .*nope"):
        find_runs([tmp_path / "a", tmp_path / "nope"])


def test_a_run_next_to_one_of_stacks_is_without_stacks(tmp_path: Path) -> None:
    engine = {"class_path": "flsuite.federation.Vectorized", "init_args": {"clients": 64}}
    for name, own in (("one", {}), ("stacks", {"engine": engine})):
        rows = [("global", "test", "accuracy", [0.5])]
        made_run(tmp_path / name, settings("FedAvg", 1, **own), rows)
    labels = [group.label for group in group_runs(find_runs([tmp_path]))]
    assert labels == ["Vectorized", "without stacks"]

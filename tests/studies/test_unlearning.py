"""Ways to remove a client from a model, and what they are measured by."""

import logging
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from flsuite.common.files import load_tensors
from flsuite.runs.rounds import read_rounds
from flsuite.studies.unlearning import (
    WAYS,
    Study,
    added,
    built,
    distance,
    fitted,
    main,
    membership,
    subtracted,
)

CONFIG = Path(__file__).parents[2] / "configs" / "counterfactual" / "unlearning.yaml"


def shortened(folder: Path, keep: bool = True) -> Path:
    """Write the shipped config with four clients and fewer steps."""
    content = yaml.safe_load(CONFIG.read_text())
    content["data"]["init_args"] |= {"clients": 4, "train_samples": 120}
    content["trainer"] |= {"rounds": 1, "max_epochs": 1, "keep_updates": keep}
    (folder / "short.yaml").write_text(yaml.safe_dump(content))
    return folder / "short.yaml"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the command writes that removes client 2."""
    folder = tmp_path_factory.mktemp("unlearning")
    level = logging.getLogger("flsuite").level
    request = ["--config", str(shortened(folder)), "--output", str(folder / "out")]
    main([*request, "--seeds", "1", "--clients", "2", "--rounds", "1"])
    assert logging.getLogger("flsuite").level == level
    return folder / "out"


def test_the_command_writes_a_row_per_way(out: Path) -> None:
    assert pd.read_csv(out / "unlearning.csv")["way"].tolist() == [*WAYS]
    assert (out / "unlearning.png").is_file()
    own = {way: pd.read_csv(out / f"1-{way}-2" / "metrics.csv") for way in ("exact", "continue")}
    assert own["continue"]["round"].max() == 2 and own["exact"]["round"].max() == 1
    assert not own["exact"]["scope"].eq("2").any(), "the removed client trains nowhere"


def test_after_one_round_to_rebuild_is_exact(out: Path) -> None:
    """The other clients have not seen a model that the removed one had a part in."""
    table = pd.read_csv(out / "unlearning.csv").set_index("way")
    apart, scores = table["distance"], table[["accuracy", "membership"]]
    assert apart["exact"] == 0 and apart["keep"] == 1
    assert apart["rebuild"] < 1e-6 < apart["subtract"]
    assert scores.loc["rebuild"].tolist() == pytest.approx(scores.loc["exact"].tolist(), abs=1e-6)


def test_what_is_subtracted_is_the_weighted_change_of_one_client(out: Path) -> None:
    study = Study(out.parent / "short.yaml", out)
    trainer, model, data = built(study, 1, "whole")
    run = trainer.prepare(model, data)
    (kept,) = read_rounds(trainer, run, out / "1-whole")
    whole = fitted(study, 1, "whole")[0]
    without = added(whole, iter([subtracted(kept, 2)]))

    models = out / "1-whole" / "updates" / "round-0001"
    states = [load_tensors(models / f"client-0000{c}.pt", "")["state"] for c in range(4)]
    samples = [run.federation.data.samples(client) for client in range(4)]
    for name, start in kept.before["state"].items():
        others = (samples[c] * (states[c][name] - start) for c in (0, 1, 3))
        expected = start + sum(others) / sum(samples)
        assert torch.allclose(without[name], expected, atol=1e-6)


def test_membership_is_the_area_under_the_curve_within_a_class() -> None:
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([1.0, 2.0, 3.0])
    one, other = torch.zeros(2), torch.zeros(3)
    assert membership(low, one, high, other) == 1.0
    assert membership(high[:2], one, low, one) == 0.0
    assert membership(low, one, low, one) == 0.5
    # Class 1 is easy for all. Only the pairs of class 0 count, since the client has no other.
    unseen, classes = torch.tensor([0.1, 0.2, 0.001]), torch.tensor([0.0, 0.0, 1.0])
    assert membership(low, one, unseen, classes) == 0.5


def test_a_distance_is_euclidean() -> None:
    first, second = (
        {"a": torch.tensor([x, 0.0]), "b": torch.tensor(y)} for x, y in ((3, 4), (0, 0))
    )
    assert distance(first, second) == 5.0


@pytest.mark.parametrize(
    ("keep", "client", "reason"),
    [(False, "0", "must have trainer.keep_updates true"), (True, "9", "from 0 to 3, got 9")],
)
def test_a_wrong_request_is_one_line_before_training(
    keep: bool, client: str, reason: str, tmp_path: Path, capsys: Any
) -> None:
    config, out = shortened(tmp_path, keep), tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        main(["--config", str(config), "--output", str(out), "--clients", client])
    *_, line = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("error: ") and reason in line
    assert not [*out.iterdir()]

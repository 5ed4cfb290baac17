"""A partition that a file states: the same run again, another system's split, bad files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flsuite.common.errors import FlsuiteError
from flsuite.data import Digits, Dirichlet, FederatedData, FromFile
from flsuite.runs.partition import samples_table
from tests.conftest import classifier, equal_states, state, trainer


def saved(file: Path, text: str) -> FromFile:
    file.write_text(text)
    return FromFile(file)


def split(partition: Any, clients: int, **kwargs: Any) -> FederatedData:
    data = Digits(clients=clients, partition=partition, **kwargs)
    data.setup()
    return data.federated


def samples(data: FederatedData) -> str:
    return samples_table(data).to_csv(index=False)


def numbers(data: FederatedData, name: str) -> list[list[int]]:
    """Return the published numbers of each client's samples of a split."""
    of = getattr(data, name)
    return [of.numbers[rows].tolist() for rows in of.rows]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"train_samples": 300, "server_samples": 40, "unseen_clients": 0.3}],
    ids=["plain", "parts"],
)
def test_a_run_on_its_own_file_ends_with_the_same_weights(
    kwargs: dict[str, Any], tmp_path: Path
) -> None:
    ends = []
    partition: Any = Dirichlet(0.3)
    for _ in range(2):
        made = trainer(rounds=2)
        data = Digits(clients=4, partition=partition, batch_size=32, **kwargs)
        made.fit(classifier(), data)
        ends.append((state(made), samples(data.federated)))
        partition = saved(tmp_path / "samples.csv", ends[0][1])
    (first, first_samples), (again, samples_again) = ends
    assert equal_states(first, again) and samples_again == first_samples


def test_a_files_split_does_not_depend_on_the_seed_or_on_the_parts(tmp_path: Path) -> None:
    before = split(Dirichlet(0.3), 4, seed=1, train_samples=300)
    partition = saved(tmp_path / "samples.csv", samples(before))
    for kwargs in ({"seed": 1}, {"seed": 2, "val_fraction": 0.5}):
        after = split(partition, 4, **kwargs)
        for name in ("train", "val", "test"):
            assert numbers(after, name) == numbers(before, name)
    fewer = split(partition, 4, seed=1, server_samples=700)
    for own, all_own in zip(numbers(fewer, "train"), numbers(before, "train"), strict=True):
        assert 0 < len(own) < len(all_own) and {*own} < {*all_own}


def test_a_published_test_sample_may_train_and_a_training_sample_may_test(tmp_path: Path) -> None:
    whole = split(None, 1)
    both = torch.cat([whole.train.x, whole.test.x])
    text = (
        "split,client,sample\ntrain,1,1500\ntrain,0,3\ntest,0,7\nval,1,1\ntest,1,1440\ntest,1,8\n"
    )
    data = split(saved(tmp_path / "theirs.csv", text), 2)
    assert numbers(data, "train") == [[3], [1500]]
    assert numbers(data, "test") == [[7], [8, 1440]]
    assert data.val is not None and numbers(data, "val") == [[], [1]]
    assert len(data.train) == 1437 - 2 + 1 and len(data.test) == 360 + 2 - 1
    for part in (data.train, data.test):
        assert part.numbers is not None and torch.equal(part.x, both[part.numbers])


def test_without_splits_the_rest_is_as_with_any_partition(tmp_path: Path) -> None:
    drawn = split(Dirichlet(0.3), 3)
    owners = np.full(1437, -1)
    for name in ("train", "val"):
        for client, own in enumerate(numbers(drawn, name)):
            owners[own] = client
    rows = "".join(f"{sample},{client}\n" for sample, client in enumerate(owners))
    data = split(saved(tmp_path / "plain.csv", f"sample,client\n{rows}"), 3)
    for name in ("train", "val", "test"):
        assert numbers(data, name) == numbers(drawn, name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("client,split,class,samples\n0,train,a,5\n", "got client, split, class, samples; part"),
        ("sample,client\n0,0\n1,x\n", "row 2, column 'client': expected a number, got 'x'"),
        ("sample,client\n0,0\n1.5,0\n", "row 2, column 'sample': expected a whole number, got 1.5"),
        ("sample,client\n-1,0\n", "row 1, column 'sample': expected a number of at least 0"),
        ("sample,client\n4,0\n5,0\n4,1\n", "row 3, column 'sample': expected a sample that no row"),
        ("sample,client\n4,0\n5,9\n", "row 2, column 'client': expected a number below 2"),
        ("sample,client,split\n4,0,train\n5,0,dev\n", "row 2, column 'split': expected train, val"),
        ("sample,client\n4,0\n5,2\n6,2\n", "client 1 has no training sample"),
        ("sample,client,split\n4,0,val\n5,1,train\n", "client 0 has no training sample"),
        ("sample,client,split\n4,0,train\n5,0,\n", "row 2, column 'split': .*got a missing value"),
        ("sample,client\n4,0\n5,1e20\n", "row 2, column 'client': .*got 100000000000000000000$"),
        ("sample,client\n4,0\n2000,0\n", "row 2, column 'sample': expected a number below 1797"),
        ("sample,client\n4,0\n5,1\n", "data.clients is 1, but .* has 2; set it to 2"),
        ("", "is empty"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=said) as error:
        split(saved(tmp_path / "bad.csv", text), 1)
    assert "bad.csv" in str(error.value) and "\n" not in str(error.value)


def test_a_client_that_keeps_no_training_sample_is_refused(tmp_path: Path) -> None:
    text = "sample,client,split\n" + "".join(f"{i},0,train\n" for i in range(600)) + "600,1,train\n"
    text += "".join(f"{i},1,val\n" for i in range(601, 1437))
    with pytest.raises(FlsuiteError, match="client 1 keeps no training sample; raise"):
        split(saved(tmp_path / "few.csv", text), 2, train_samples=200)


def test_a_resume_with_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "samples.csv"

    def fit(rows: str, rounds: int) -> None:
        made = trainer(rounds=rounds, run_dir=tmp_path / "run")
        data = Digits(clients=2, partition=saved(file, f"sample,client\n{rows}"), batch_size=32)
        made.fit(classifier(), data, ckpt_path="last")

    fit("1,0\n2,0\n3,1\n", 1)
    fit("1,0\n2,0\n3,1\n", 2)
    with pytest.raises(FlsuiteError, match=r"data\.partition\.path is 'samples.csv, content"):
        fit("1,0\n2,1\n3,1\n", 3)

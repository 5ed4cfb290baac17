"""The same weights in Flower's own processes."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from tests.conftest import equal_states
from tests.flower.example import our_own
from tests.flower.processes import Processes, free_port, under_flower

MODEL = "--model ACVAE --model.latent_dim 4 --model.width 4 --data.standardize false"
CLASS_PRIORS = f"{MODEL} --trainer.aggregator CMGA"


@pytest.mark.long
def test_flowers_own_simulation_gives_the_same_model(tmp_path: Path) -> None:
    """Run three clients with private encoders, and priors on the server, on two workers."""
    arguments = f"{CLASS_PRIORS} --data.clients 3 --trainer.rounds 2"
    with Processes(tmp_path) as flower:
        flower.connect("insecure = true")
        flower.start("flower-superlink", "--insecure", "--simulation", "--port", str(flower.port))
        flower.wait("list", "test")
        size = "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"
        theirs, their_table = under_flower(flower, arguments, "--federation-config", size)
    ours, our_table = our_own(arguments, tmp_path)
    assert equal_states(ours, theirs) and our_table == their_table


@pytest.mark.timeout(600)  # five processes that each import torch and Flower
@pytest.mark.long
def test_a_superlink_and_two_supernodes_give_the_same_model(tmp_path: Path) -> None:
    """Use private encoders that stay on the nodes."""
    arguments = f"{CLASS_PRIORS} --trainer.rounds 2"
    with Processes(tmp_path) as flower:
        flower.connect("insecure = true")
        flower.start("flower-superlink", "--insecure", "--port", str(flower.port))
        flower.wait("list", "test")
        for node in range(2):
            link = "--superlink", f"127.0.0.1:{flower.port}", "--port", str(free_port())
            own = "--node-config", f"partition-id={node} num-partitions=2"
            flower.start("flower-supernode", "--insecure", *link, *own)
        theirs, their_table = under_flower(flower, arguments)
    ours, our_table = our_own(arguments, tmp_path)
    assert equal_states(ours, theirs) and our_table == their_table

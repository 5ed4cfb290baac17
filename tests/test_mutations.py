"""The listed changes that tests must notice still fit the code."""

from pathlib import Path

import pytest

import flsuite
from tests.benchmarks.mutations import MUTATIONS, Mutation, broken


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place(mutation: Mutation) -> None:
    source = (Path(flsuite.__file__).parent / mutation.path).read_text()
    assert broken(source, mutation) != source

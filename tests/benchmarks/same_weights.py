"""Compares the final weights of twelve short runs with those of another commit, bit for bit.

``python -m tests.benchmarks.same_weights COMMIT`` runs both trees on this machine, because the
bits depend on the processor. Each run is of another family of methods. It is made in one process
and in two workers.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHORT = ["--trainer.rounds", "3", "--data.clients", "6", "--trainer.max_epochs", "1"]
WORKERS = ["--trainer.engine", "Processes", "--trainer.engine.workers", "2"]
RUNS: dict[str, list[str]] = {
    "average": ["--trainer.aggregator", "FedAvg"],
    "server optimizer": ["--trainer.aggregator", "FedAdam", "--trainer.keep_optimizers", "true"],
    "control variates": ["--trainer.aggregator", "SCAFFOLD"],
    "feature term": ["--trainer.aggregator", "MOON"],
    "personal": ["--trainer.aggregator", "FedRep", "--trainer.max_epochs", "2"],
    "robust": [
        *("--trainer.aggregator", "MultiKrum", "--trainer.aggregator.byzantine", "1"),
        *("--trainer.attack", "SignFlip", "--trainer.attack.clients", "[2]"),
    ],
    "compressed": [
        "--trainer.compression",
        "TopK",
        "--trainer.compression.fraction",
        "0.2",
        "--model",
        "NFClassifier",
    ],
    "statistics": ["--trainer.aggregator", "RegMean", "--trainer.aggregator.alpha", "0.5"],
    "latent": ["--trainer.aggregator", "CMGA", "--model", "ACVAE", "--data.standardize", "false"],
    "asynchronous": [
        *("--trainer.aggregator", "FedBuff", "--trainer.schedule", "Asynchronous"),
        *("--trainer.schedule.concurrency", "4", "--trainer.schedule.buffer_size", "2"),
    ],
    "masked": ["--trainer.secure_sum", "PairwiseMasks", "--trainer.batchnorm", "local"],
    "stacks": ["--trainer.engine", "Vectorized"],
}
"""The arguments of each run, after those of the quickstart."""

# Starts in the tree to run. It writes {run: digest of the final state} to a file.
_CHILD = """
import hashlib, json, sys, torch
from flsuite.commands.main import main
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    try:
        main(["fit", *arguments, "--run_dir", "runs/" + name])
    except SystemExit as end:
        assert not end.code, name
    state = torch.load(f"runs/{name}/checkpoints/model.ckpt", weights_only=True)["state_dict"]
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode() + state[key].numpy().tobytes())
    found[name] = digest.hexdigest()[:16]
json.dump(found, open("weights.json", "w"))
"""


def weights_of(tree: Path, folder: Path) -> dict[str, str]:
    """Return the digest of the final weights of every run in one tree."""
    start = ["--config", str(ROOT / "configs/quickstart.yaml"), *SHORT]
    runs = {name: [*start, *arguments] for name, arguments in RUNS.items()}
    in_workers = {f"{name}, 2 workers": [*args, *WORKERS] for name, args in runs.items()}
    del in_workers["stacks, 2 workers"]
    folder.mkdir()
    command = [sys.executable, "-c", _CHILD, json.dumps(runs | in_workers)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads((folder / "weights.json").read_text()))


def main(commit: str) -> int:
    """Compare this tree with a commit. The exit status is 1 if a run ends elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(before), commit], cwd=ROOT, check=True
        )
        try:
            old = weights_of(before, Path(folder, "old"))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT)
        new = weights_of(ROOT, Path(folder, "new"))

    for name in old:
        print(f"{name:30} {old[name]} {'equal' if new[name] == old[name] else new[name]}")
    return int(new != old)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

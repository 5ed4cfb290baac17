"""Ways to break the core by one line, each of which the fast tests must notice.

    python -m tests.benchmarks.mutations              # all, in about half an hour
    python -m tests.benchmarks.mutations staleness    # those with this word in their name or file

A copy of the tree is broken, not the tree itself. The exit status is 1 if a change stays unnoticed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """One change of the source.

    Attributes:
        name: What it breaks.
        path: The file, relative to the package.
        old: The text, which the file has exactly once.
        new: The text in its place.
        tests: Where to look first, relative to the tests. The whole suite follows.
    """

    name: str
    path: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "samples do not weigh",
        "aggregators/rules/base.py",
        'return float(update.samples) if self.weighting == "samples" else 1.0',
        "return 1.0",
        "aggregators/test_fedavg.py",
    ),
    Mutation(
        "staleness does not damp",
        "aggregators/rules/mean.py",
        "damped = weight * staleness_weight(self.staleness, update.staleness)",
        "damped = weight",
        "aggregators/test_fedbuff.py",
    ),
    Mutation(
        "a damped buffer moves the model in full",
        "aggregators/rules/mean.py",
        "rate *= total / undamped",
        "rate *= 1.0",
        "aggregators/test_fedbuff.py",
    ),
    Mutation(
        "buffers overshoot with a rate above 1",
        "aggregators/rules/mean.py",
        "min(rate, 1.0)",
        "rate",
        "aggregators/test_fedbuff.py aggregators/test_limits.py",
    ),
    Mutation(
        "counters take the minimum",
        "aggregators/rules/mean.py",
        "torch.maximum(old, new)",
        "torch.minimum(old, new)",
        "aggregators/test_fedavg.py",
    ),
    Mutation(
        "polynomial staleness is off by one",
        "aggregators/staleness.py",
        "float(tau + 1) ** -self.p",
        "float(max(tau, 1)) ** -self.p",
        "aggregators/test_staleness.py",
    ),
    Mutation(
        "late updates are rebased with the wrong sign",
        "aggregators/staleness.py",
        "value.double() + (now.double() - base.double())",
        "value.double() - (now.double() - base.double())",
        "aggregators/test_robust_rules.py",
    ),
    Mutation(
        "the staleness of arrivals is off by one",
        "federation/server/arrivals.py",
        "update.staleness = record.round - start.broadcast.round",
        "update.staleness = max(record.round - start.broadcast.round - 1, 0)",
        "federation/server/test_arrivals.py",
    ),
    Mutation(
        "logged means ignore the samples",
        "federation/server/arrivals.py",
        "weighted = sum(update.samples * update.metrics[name] for update in have)",
        "weighted = sum(have[0].samples * update.metrics[name] for update in have)",
        "federation/server/test_arrivals.py server callbacks/test_logging.py",
    ),
    Mutation(
        "reset buffers of late clients are measured from the old version",
        "federation/server/federation.py",
        "return {**broadcast.state, **{name: self.state[name] for name in reset}}",
        "return broadcast.state",
        "federation/server/test_federation.py test_asynchronous.py runs/test_resume.py",
    ),
    Mutation(
        "initial entries override the server's",
        "federation/server/federation.py",
        "return {**self.initial, **self.state, **own}",
        "return {**self.state, **own, **self.initial}",
        "federation/server/test_federation.py models/test_modes.py federation/client",
    ),
    Mutation(
        "a model that is not finite becomes the next version",
        "federation/server/federation.py",
        "if fault is None and (bad := non_finite(state)):",
        "if fault is None and (bad := None):",
        "federation/server/test_federation.py",
    ),
    Mutation(
        "a resume forgets the clients' memories",
        "federation/server/federation.py",
        '"clients": dict(self.clients.versions),',
        '"clients": {},',
        "runs/test_resume.py models/test_fusedspacefed.py",
    ),
    Mutation(
        "old memories are removed before the new checkpoint is in place",
        "runs/store.py",
        "        def publish() -> None:\n",
        "        def publish() -> None:\n            clients.remove_unused(*used)\n",
        "runs/test_crash_points.py",
    ),
    Mutation(
        "an update is not a copy",
        "federation/client/runner.py",
        'state=clone(shared, "cpu" if setup.uplink.pipeline.transforms else None),',
        "state=shared,",
        "federation/client/test_runner.py federation/engines/test_pool.py",
    ),
    Mutation(
        "a fit changes its client's stored memory",
        "federation/client/setup.py",
        'memory=mapped(request.memory.get("objective", {}), _copied),',
        'memory=request.memory.get("objective", {}),',
        "federation/client/test_runner.py federation/server aggregators/test_scaffold.py",
    ),
    Mutation(
        "buffers of earlier clients are not reset",
        "federation/client/setup.py",
        "**private, **reset}",
        "**private}",
        "models/test_classifier.py federation/client/test_runner.py runs/test_resume.py",
    ),
    Mutation(
        "private entries of another client stay",
        "federation/client/setup.py",
        "moved({**self._setup.initial, **broadcast.state}, device)",
        "moved(broadcast.state, device)",
        "federation/client/test_runner.py models/test_fusedspacefed.py",
    ),
    Mutation(
        "a second fit from one version repeats the first one's draws",
        "federation/client/runner.py",
        'stream = f"fit/{request.repeat}" if request.repeat else "fit"',
        'stream = "fit"',
        "federation/client/test_runner.py test_asynchronous.py",
    ),
    Mutation(
        "metrics of a model leak into the next client",
        "federation/client/entries.py",
        "metric.reset()",
        "pass",
        "federation/client/test_runner.py",
    ),
    Mutation(
        "SCAFFOLD corrects with the wrong sign",
        "aggregators/scaffold.py",
        "g[k] + correction[k]",
        "g[k] - correction[k]",
        "aggregators/test_scaffold.py",
    ),
    Mutation(
        "SCAFFOLD's server variate ignores the share of the cohort",
        "aggregators/scaffold.py",
        "updates / server.layout.clients",
        "1.0",
        "aggregators/test_scaffold.py",
    ),
    Mutation(
        "the proximal term pushes away",
        "aggregators/objectives/base.py",
        "w[k] - held[k]",
        "held[k] - w[k]",
        "aggregators/test_fedprox.py",
    ),
    Mutation(
        "the server steps uphill",
        "aggregators/server_optimizers.py",
        "parameter - model[name].to(torch.float64)",
        "model[name].to(torch.float64) - parameter",
        "aggregators/test_server_optimizers.py",
    ),
    Mutation(
        "the server's momentum is forgotten",
        "aggregators/server_optimizers.py",
        "if server.memory:",
        "if not server:",
        "aggregators/test_server_optimizers.py",
    ),
    Mutation(
        "the adaptive second moment starts at zero",
        "aggregators/server_optimizers.py",
        'torch.full_like(parameter, group["tau"] ** 2)',
        "torch.zeros_like(parameter)",
        "aggregators/test_server_optimizers.py",
    ),
    Mutation(
        "transforms are undone in the order in which they were applied",
        "aggregators/uplink.py",
        "for place in reversed(range(len(self.transforms))):",
        "for place in range(len(self.transforms)):",
        "aggregators/exchange/test_compressed_federations.py federation/engines/test_parts.py",
    ),
    Mutation(
        "the server trusts the clients to clip",
        "aggregators/transforms/gaussian.py",
        'payload, _ = clipped(payload, received["clip"])',
        "",
        "aggregators/test_dp_fedavg.py",
    ),
    Mutation(
        "of two arrivals at one time, the later start comes first",
        "federation/schedules/asynchronous.py",
        "(fit.ended, fit.started, fit.client, fit)",
        "(fit.ended, -fit.started, fit.client, fit)",
        "federation/schedules/test_asynchronous.py",
    ),
    Mutation(
        "each update restarts the buffer's timeout",
        "federation/schedules/asynchronous.py",
        "if self._buffer == {fit.number}:",
        "if self._buffer:",
        "federation/schedules/test_asynchronous.py",
    ),
    Mutation(
        "all draws from one version are the same",
        "federation/schedules/launcher.py",
        'numpy_generator(self._seed, "cohort", clock.round + 1, attempt)',
        'numpy_generator(self._seed, "cohort", clock.round + 1, 0)',
        "federation/schedules/test_launcher.py",
    ),
    Mutation(
        "a last batch of one sample is trained on",
        "data/loader.py",
        "samples - starts[-1] == 1:",
        "samples - starts[-1] == 0:",
        "data/test_module.py",
    ),
    Mutation(
        "counters are summed over clients",
        "common/state.py",
        "torch.maximum(greatest, value.to(greatest.device))",
        "greatest + value",
        "test_state.py",
    ),
    Mutation(
        "draws do not depend on the round",
        "common/random.py",
        "zlib.crc32(stream.encode()), round, client + 1]",
        "zlib.crc32(stream.encode()), 0, client + 1]",
        "test_random.py",
    ),
    Mutation(
        "the cross term of gamma counts once",
        "metrics/dissimilarity.py",
        "2 * self._cross / self._plain.count",
        "self._cross / self._plain.count",
        "metrics/test_dissimilarity.py",
    ),
    Mutation(
        "FedDyn divides by the cohort",
        "aggregators/feddyn.py",
        "share = self.alpha * len(updates) / server.layout.clients",
        "share = self.alpha",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "MOON pushes features from the global model's",
        "aggregators/moon.py",
        "log_softmax(1)[:, 0]",
        "log_softmax(1)[:, 1]",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "FedALA forgets its weights",
        "aggregators/fedala.py",
        'notes["weights"] = clone(weights)',
        "clone(weights)",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "FedRep trains the body with the head",
        "aggregators/fedrep.py",
        "if name.startswith(self.head) == is_for_head",
        "if True",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "Ditto pulls to the model that was just trained",
        "aggregators/ditto.py",
        "v[k] - w_t[k]",
        "v[k] - w[k]",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "APFL's local gradient lacks the factor alpha",
        "aggregators/apfl.py",
        "{k: alpha.to(g[k].dtype) * g[k] for k in g}",
        "g",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "a personal model starts anew for every batch",
        "aggregators/ditto.py",
        'return oracle(w, batch), {"w_t": w_t, "v": v}',
        "return oracle(w, batch), held",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "clients outside the federation take part in pooled training",
        "data/federated.py",
        "return rows.values[: int(rows.offsets[self.clients])]",
        "return rows.values",
        "data/test_module.py",
    ),
    Mutation(
        "a stack is clipped by the norm of all its clients",
        "federation/client/stacked_loss.py",
        "factors = (float(limit) / (torch.stack(norms).norm(dim=0) + 1e-6)).clamp(max=1.0)",
        "factors = (float(limit) / (torch.stack(norms).norm().expand(len(norms[0])) + 1e-6))"
        ".clamp(max=1.0)",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "the statistics of a stack stay",
        "federation/client/stack_steps.py",
        "self.others[name][at] = value",
        "pass",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "a stack decays what its loss does not depend on",
        "federation/client/stack_proofs.py",
        "if g is not None]",
        "]",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "a client of a stack trains on after its last step",
        "federation/client/stack_steps.py",
        "if step + 1 == self.members[place].steps:",
        "if step + 1 == max(member.steps for member in self.members):",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "the rate of a stack does not fall",
        "federation/client/stack.py",
        'group["lr"] *= decay.factor(round) if decay else 1.0',
        'group["lr"] *= 1.0',
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "the end of a stacked fit is not the algorithm's",
        "federation/client/stack.py",
        "self.halves.end(member.client, state, steps.helds_of(place))",
        "pass",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "a sample that fills up a batch counts",
        "federation/client/stacked_loss.py",
        "< size\n",
        "<= size\n",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "Opacus reads images in color as if they lay in order",
        "callbacks/dp_sgd.py",
        "    return tuple(value.contiguous() for value in inputs)",
        "    return inputs",
        "callbacks/test_dp_sgd_alone.py",
    ),
    Mutation(
        "a term is filled up sample by sample if it is zero at the start",
        "federation/client/stack_proofs.py",
        "for start in (parameters, _moved(parameters)):",
        "for start in (parameters,):",
        "aggregators/test_stated_objectives.py",
    ),
    Mutation(
        "batches are filled up whatever the loss",
        "federation/client/stack_proofs.py",
        "a.keys() == b.keys() and all(_is_close(a[name], b[name]) for name in a)",
        "a.keys() == b.keys()",
        "aggregators/test_stated_objectives.py",
    ),
    Mutation(
        "a stack's second models read what the first client holds",
        "federation/client/stack_steps.py",
        "lambda *parts: stacked(parts, device)",
        "lambda *parts: stacked(parts[:1] * len(parts), device)",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "the optimizer of a stack does not go on",
        "federation/client/stack.py",
        "            optimizer.load([",
        "            list([",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "a second model loses a buffer that a step replaces",
        "aggregators/losses.py",
        "others[name].copy_(ends[name].detach())",
        "pass",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "the engine is not a setting of the record",
        "federation/engines/auto.py",
        'decides = ("clients",)',
        "decides = ()",
        "federation/engines/test_vectorized.py",
    ),
    Mutation(
        "FedALA mixes the client's own weights for the global ones",
        "aggregators/fedala.py",
        "return {k: v[k].lerp(w[k], weights[k]) for k in weights}",
        "return {k: w[k].lerp(v[k], weights[k]) for k in weights}",
        "aggregators/test_fedala.py aggregators/test_twins.py",
    ),
    Mutation(
        "FedALA settles too soon",
        "aggregators/fedala.py",
        "return len(losses) > _COMPARED and",
        "return len(losses) > 1 and",
        "aggregators/test_fedala.py aggregators/test_twins.py",
    ),
    Mutation(
        "APFL's share climbs",
        "aggregators/apfl.py",
        "alpha = (alpha - oracle.rate *",
        "alpha = (alpha + oracle.rate *",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "IFCA chooses the worst model",
        "aggregators/ifca.py",
        "chosen = min(range(len(losses))",
        "chosen = max(range(len(losses))",
        "aggregators/test_ifca.py",
    ),
    Mutation(
        "an absent class is pushed down",
        "aggregators/fedrod.py",
        "clamp(min=-1e4)",
        "clamp(min=0.0)",
        "aggregators/test_fedrod.py",
    ),
    Mutation(
        "PFedMe moves away from its proximal points",
        "aggregators/pfedme.py",
        "self.lam * (w[k] - theta[k])",
        "self.lam * (theta[k] - w[k])",
        "aggregators/test_twins.py",
    ),
    Mutation(
        "FedRep trains the head an epoch too long",
        "aggregators/fedrep.py",
        "epoch < self.head_epochs",
        "epoch <= self.head_epochs",
        "aggregators/test_fedrep.py",
    ),
    Mutation(
        "a fork keeps the state of another algorithm",
        "runs/fork.py",
        "        if _classes(ours[name]) != _classes(theirs[name])\n",
        "        if False\n",
        "runs/test_fork.py",
    ),
    Mutation(
        "a fork's clients may hold other samples by another seed",
        "runs/fork.py",
        'settings["seed"] if seed is None else seed',
        "seed",
        "runs/test_fork.py",
    ),
    Mutation(
        "a parent's picked round counts as the fork's",
        "runs/fork.py",
        "return is_other_run and round < first_round(settings)",
        "return False",
        "commands/test_verify.py",
    ),
    Mutation(
        "verify leaves out the last replayed round",
        "commands/comparison.py",
        "rounds = Comparison(), range(start + 1, stop + 1)",
        "rounds = Comparison(), range(start + 1, stop)",
        "commands/test_verify.py",
    ),
    Mutation(
        "verify compares no kept weights",
        "commands/comparison.py",
        "            _compare_states(path, ours[round], round, found)",
        "            pass",
        "commands/test_verify.py",
    ),
    Mutation(
        "a pack may name functions",
        "commands/foreign.py",
        "is_public = inspect.isclass(found) and",
        "is_public = True or",
        "commands/test_foreign.py",
    ),
    Mutation(
        "a packed file may differ from its digest",
        "commands/pack.py",
        "if digest(path) != content:",
        "if False:",
        "commands/test_verify.py",
    ),
    Mutation(
        "a resume takes a changed table",
        "runs/table.py",
        "if digest is not None and hashlib.sha256(content).hexdigest() != digest:",
        "if False:",
        "runs/test_tables.py runs/test_folder.py",
    ),
    Mutation(
        "unlearning subtracts equal shares",
        "studies/unlearning.py",
        "share = update.samples / samples",
        "share = 1 / len(one.updates)",
        "studies/test_unlearning.py",
    ),
    Mutation(
        "an attacker takes high losses for members",
        "studies/unlearning.py",
        "mannwhitneyu(other, one,",
        "mannwhitneyu(one, other,",
        "studies/test_unlearning.py",
    ),
]


def main(word: str = "") -> int:
    """Break a copy of the tree by each change, and print the test that notices."""
    unnoticed = 0
    for mutation in MUTATIONS:
        if word not in mutation.name and word not in mutation.path:
            continue
        with tempfile.TemporaryDirectory() as folder:
            failed = first_failure(mutation, Path(folder))
        unnoticed += failed is None
        print(f"{mutation.name} ({mutation.path}): {failed or 'NOT NOTICED'}", flush=True)
    return int(unnoticed > 0)


def first_failure(mutation: Mutation, folder: Path) -> str | None:
    """Return the first fast test that fails on a broken copy of the tree, or ``None``."""
    pages = ("README.md", "CHANGELOG.md")
    for name in ("flsuite", "tests", "configs", "notebooks", "pyproject.toml", *pages):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, folder / name)
    path = folder / "flsuite" / mutation.path
    path.write_text(broken(path.read_text(), mutation))
    return _first_failure(folder, mutation.tests.split()) or _first_failure(folder, [])


def broken(source: str, mutation: Mutation) -> str:
    """Return a file with the change."""
    assert source.count(mutation.old) == 1, f"{mutation.path} has not one {mutation.old!r}"
    return source.replace(mutation.old, mutation.new)


def _first_failure(folder: Path, places: list[str]) -> str | None:
    known = [f"tests/{place}" for place in places if (folder / "tests" / place).exists()]
    if places and not known:
        return None
    tests = known or ["tests", "-n", "2"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1, 2) or (done.returncode and not found):
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return found and found[1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))

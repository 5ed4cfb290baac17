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
from collections.abc import Iterator
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


# The file, and for each of its changes the name, the tests, the text and the text in its place.
_LISTED = r"""
aggregators/rules/base.py
samples do not weigh: aggregators/test_fedavg.py
- return float(update.samples) if self.weighting == "samples" else 1.0
+ return 1.0

aggregators/rules/mean.py
staleness does not damp: aggregators/test_fedbuff.py
- damped = weight * staleness_weight(self.staleness, update.staleness)
+ damped = weight
a damped buffer moves the model in full: aggregators/test_fedbuff.py
- rate *= total / undamped
+ rate *= 1.0
buffers overshoot with a rate above 1: aggregators/test_fedbuff.py aggregators/test_limits.py
- min(rate, 1.0)
+ rate
counters take the minimum: aggregators/test_fedavg.py
- torch.maximum(old, new)
+ torch.minimum(old, new)

aggregators/staleness.py
polynomial staleness is off by one: aggregators/test_staleness.py
- float(tau + 1) ** -self.p
+ float(max(tau, 1)) ** -self.p
late updates are rebased with the wrong sign: aggregators/test_robust_rules.py
- value.double() + (now.double() - base.double())
+ value.double() - (now.double() - base.double())

federation/server/arrivals.py
the staleness of arrivals is off by one: federation/server/test_arrivals.py
- update.staleness = record.round - start.broadcast.round
+ update.staleness = max(record.round - start.broadcast.round - 1, 0)
logged means ignore the samples: federation/server/test_arrivals.py server callbacks/test_logging.py
- weighted = sum(update.samples * update.metrics[name] for update in have)
+ weighted = sum(have[0].samples * update.metrics[name] for update in have)

federation/server/federation.py
reset buffers of late clients are measured from the old version:
  federation/server/test_federation.py test_asynchronous.py runs/test_resume.py
- return {**broadcast.state, **{name: self.state[name] for name in reset}}
+ return broadcast.state
initial entries override the server's:
  federation/server/test_federation.py models/test_modes.py federation/client
- return {**self.initial, **self.state, **own}
+ return {**self.state, **own, **self.initial}
a model that is not finite becomes the next version: federation/server/test_federation.py
- if fault is None and (bad := non_finite(state)):
+ if fault is None and (bad := None):
a resume forgets the clients' memories: runs/test_resume.py models/test_fusedspacefed.py
- "clients": dict(self.clients.versions),
+ "clients": {},

runs/store.py
old memories are removed before the new checkpoint is in place: runs/test_crash_points.py
-         def publish() -> None:
+         def publish() -> None:
+             clients.remove_unused(*used)

federation/client/jobs.py
an update is not a copy: federation/client/test_runner.py federation/engines/test_pool.py
- outcome.update.state = clone(outcome.update.state)
+ outcome.update.state = dict(outcome.update.state)
models measured after a stack are summed late: federation/engines/test_parts.py
- if trained and not trained.measures else
+ if trained else

common/state.py
a stack's models have equal weights in its sum: common/test_state.py
- factor, tree = factor * tree.factor, tree.tree
+ factor, tree = factor, tree.tree

federation/client/runner.py
a second fit from one version repeats the first one's draws:
  federation/client/test_runner.py test_asynchronous.py
- stream = f"fit/{request.repeat}" if request.repeat else "fit"
+ stream = "fit"

federation/client/setup.py
a fit changes its client's stored memory:
  federation/client/test_runner.py federation/server aggregators/test_scaffold.py
- memory=mapped(request.memory.get("objective", {}), _copied),
+ memory=request.memory.get("objective", {}),
buffers of earlier clients are not reset:
  models/test_classifier.py federation/client/test_runner.py runs/test_resume.py
- **private, **reset}
+ **private}
private entries of another client stay:
  federation/client/test_runner.py models/test_fusedspacefed.py
- moved({**self._setup.initial, **broadcast.state}, device)
+ moved(broadcast.state, device)

federation/client/entries.py
metrics of a model leak into the next client: federation/client/test_runner.py
- metric.reset()
+ pass

aggregators/scaffold.py
SCAFFOLD corrects with the wrong sign: aggregators/test_scaffold.py
- g[k] + correction[k]
+ g[k] - correction[k]
SCAFFOLD's server variate ignores the share of the cohort: aggregators/test_scaffold.py
- updates / server.layout.clients
+ 1.0

aggregators/objectives/base.py
the proximal term pushes away: aggregators/test_fedprox.py
- w[k] - held[k]
+ held[k] - w[k]

aggregators/server_optimizers.py
the server steps uphill: aggregators/test_server_optimizers.py
- parameter - model[name].to(torch.float64)
+ model[name].to(torch.float64) - parameter
the server's momentum is forgotten: aggregators/test_server_optimizers.py
- if server.memory:
+ if not server:
the adaptive second moment starts at zero: aggregators/test_server_optimizers.py
- torch.full_like(parameter, group["tau"] ** 2)
+ torch.zeros_like(parameter)

aggregators/uplink.py
transforms are undone in the order in which they were applied:
  aggregators/exchange/test_compressed_federations.py federation/engines/test_parts.py
- for place in reversed(range(len(self.transforms))):
+ for place in range(len(self.transforms)):

aggregators/transforms/gaussian.py
the server trusts the clients to clip: aggregators/test_dp_fedavg.py
- payload, _ = clipped(payload, received["clip"])
+ pass

federation/schedules/asynchronous.py
of two arrivals at one time, the later start comes first: federation/schedules/test_asynchronous.py
- (fit.ended, fit.started, fit.client, fit)
+ (fit.ended, -fit.started, fit.client, fit)
each update restarts the buffer's timeout: federation/schedules/test_asynchronous.py
- if self._buffer == {fit.number}:
+ if self._buffer:

federation/schedules/launcher.py
all draws from one version are the same: federation/schedules/test_launcher.py
- numpy_generator(self._seed, "cohort", clock.round + 1, attempt)
+ numpy_generator(self._seed, "cohort", clock.round + 1, 0)

data/loader.py
a last batch of one sample is trained on: data/test_module.py
- samples - starts[-1] == 1:
+ samples - starts[-1] == 0:

common/state.py
counters are summed over clients: test_state.py
- torch.maximum(greatest, value.to(greatest.device))
+ greatest + value

common/random.py
draws do not depend on the round: test_random.py
- zlib.crc32(stream.encode()), round, client + 1]
+ zlib.crc32(stream.encode()), 0, client + 1]

metrics/dissimilarity.py
the cross term of gamma counts once: metrics/test_dissimilarity.py
- 2 * self._cross / self._plain.count
+ self._cross / self._plain.count

aggregators/feddyn.py
FedDyn divides by the cohort: aggregators/test_twins.py
- share = self.alpha * len(updates) / server.layout.clients
+ share = self.alpha

aggregators/moon.py
MOON pushes features from the global model's: aggregators/test_twins.py
- log_softmax(1)[:, 0]
+ log_softmax(1)[:, 1]

aggregators/fedala.py
FedALA forgets its weights: aggregators/test_twins.py
- notes["weights"] = clone(weights)
+ clone(weights)
FedALA mixes the client's own weights for the global ones:
  aggregators/test_fedala.py aggregators/test_twins.py
- return {k: v[k].lerp(w[k], weights[k]) for k in weights}
+ return {k: w[k].lerp(v[k], weights[k]) for k in weights}
FedALA settles too soon: aggregators/test_fedala.py aggregators/test_twins.py
- return len(losses) > _COMPARED and
+ return len(losses) > 1 and

aggregators/fedrep.py
FedRep trains the body with the head: aggregators/test_twins.py
- if name.startswith(self.head) == is_for_head
+ if True
FedRep trains the head an epoch too long: aggregators/test_fedrep.py
- epoch < self.head_epochs
+ epoch <= self.head_epochs

aggregators/ditto.py
Ditto pulls to the model that was just trained: aggregators/test_twins.py
- v[k] - w_t[k]
+ v[k] - w[k]
a personal model starts anew for every batch: aggregators/test_twins.py
- return oracle(w, batch), {"w_t": w_t, "v": v}
+ return oracle(w, batch), held

aggregators/apfl.py
APFL's local gradient lacks the factor alpha: aggregators/test_twins.py
- {k: alpha.to(g[k].dtype) * g[k] for k in g}
+ g
APFL's share climbs: aggregators/test_twins.py
- alpha = (alpha - oracle.rate *
+ alpha = (alpha + oracle.rate *

data/federated.py
clients outside the federation take part in pooled training: data/test_module.py
- return rows.values[: int(rows.offsets[self.clients])]
+ return rows.values

federation/client/stacked_loss.py
a stack is clipped by the norm of all its clients: federation/engines/test_vectorized.py
- factors = (float(limit) / (torch.stack(norms).norm(dim=0) + 1e-6)).clamp(max=1.0)
+ factors = (float(limit) / (torch.stack(norms).norm().expand(len(norms[0])) + 1e-6)).clamp(max=1.0)
a sample that fills up a batch counts: federation/engines/test_vectorized.py
- counts = torch.arange(len(values), device=values.device) < size
+ counts = torch.arange(len(values), device=values.device) <= size

federation/client/recorded.py
a recorded step serves other attributes of the model: federation/engines/test_recorded.py
- if self._content != before:
+ if before is None:
a recorded step keeps tensors that it is not given: federation/engines/test_recorded.py
- if any(node.op == "get_attr" for node in graph.graph.nodes):
+ if False:
a step that sets the random state is replayed: federation/engines/test_recorded.py
- if not is_same:  # such as
+ if False:  # such as
a step that changes its batch is recorded: federation/engines/test_recorded.py
- if changed or number.is_read:
+ if number.is_read:
a replay is not compared with the step: federation/engines/test_recorded.py
- if kind not in self._due:
+ if True:

federation/client/stack_steps.py
the statistics of a stack stay: federation/engines/test_vectorized.py
- self.others[name][at] = value
+ pass
a client of a stack trains on after its last step: federation/engines/test_vectorized.py
- if step + 1 == self.members[place].steps:
+ if step + 1 == max(member.steps for member in self.members):
a stack's second models read what the first client holds: federation/engines/test_vectorized.py
- lambda *parts: stacked(parts, device)
+ lambda *parts: stacked(parts[:1] * len(parts), device)

federation/client/stack_proofs.py
a stack decays what its loss does not depend on: federation/engines/test_vectorized.py
- if g is not None]
+ ]
a term is filled up sample by sample if it is zero at the start:
  aggregators/test_stated_objectives.py
- for start in (parameters, _moved(parameters)):
+ for start in (parameters,):
batches are filled up whatever the loss: aggregators/test_stated_objectives.py
- a.keys() == b.keys() and all(_is_close(a[name], b[name]) for name in a)
+ a.keys() == b.keys()

federation/client/stack.py
the rate of a stack does not fall: federation/engines/test_vectorized.py
- group["lr"] *= decay.factor(round) if decay else 1.0
+ group["lr"] *= 1.0
the end of a stacked fit is not the algorithm's: federation/engines/test_vectorized.py
- self.halves.end(member.client, state, steps.helds_of(place))
+ pass
the optimizer of a stack does not go on: federation/engines/test_vectorized.py
-             optimizer.load([
+             list([

callbacks/dp_sgd.py
Opacus reads images in color as if they lay in order: callbacks/test_dp_sgd_alone.py
-     return tuple(value.contiguous() for value in inputs)
+     return inputs

aggregators/losses.py
a second model loses a buffer that a step replaces: federation/engines/test_vectorized.py
- others[name].copy_(ends[name].detach())
+ pass

federation/engines/auto.py
the engine is not a setting of the record: federation/engines/test_vectorized.py
- decides = ("clients",)
+ decides = ()

aggregators/ifca.py
IFCA chooses the worst model: aggregators/test_ifca.py
- chosen = min(range(len(losses))
+ chosen = max(range(len(losses))

aggregators/fedrod.py
an absent class is pushed down: aggregators/test_fedrod.py
- clamp(min=-1e4)
+ clamp(min=0.0)

aggregators/pfedme.py
PFedMe moves away from its proximal points: aggregators/test_twins.py
- self.lam * (w[k] - theta[k])
+ self.lam * (theta[k] - w[k])

runs/fork.py
a fork keeps the state of another algorithm: runs/test_fork.py
-         if _classes(ours[name]) != _classes(theirs[name])
+         if False
a fork's clients may hold other samples by another seed: runs/test_fork.py
- settings["seed"] if seed is None else seed
+ seed
a parent's picked round counts as the fork's: commands/test_verify.py
- return is_other_run and round < first_round(settings)
+ return False

commands/comparison.py
verify leaves out the last replayed round: commands/test_verify.py
- rounds = Comparison(), range(start + 1, stop + 1)
+ rounds = Comparison(), range(start + 1, stop)
verify compares no kept weights: commands/test_verify.py
-             _compare_states(path, ours[round], round, found)
+             pass

commands/foreign.py
a pack may name functions: commands/test_foreign.py
- is_public = inspect.isclass(found) and
+ is_public = True or

commands/pack.py
a packed file may differ from its digest: commands/test_verify.py
- if digest(path) != content:
+ if False:

runs/table.py
a resume takes a changed table: runs/test_tables.py runs/test_folder.py
- if digest is not None and hashlib.sha256(content).hexdigest() != digest:
+ if False:

studies/unlearning.py
unlearning subtracts equal shares: studies/test_unlearning.py
- share = update.samples / samples
+ share = 1 / len(one.updates)
an attacker takes high losses for members: studies/test_unlearning.py
- mannwhitneyu(other, one,
+ mannwhitneyu(one, other,
"""


def _listed() -> Iterator[Mutation]:
    change = re.compile(r"(.+): (.+)\n((?:- .*\n)+)((?:\+ .*\n)+)")
    for block in _LISTED.replace(":\n  ", ": ").strip().split("\n\n"):
        path, _, changes = f"{block}\n".partition("\n")
        for name, tests, *texts in change.findall(changes):
            old, new = (re.sub("^. ", "", text, flags=re.MULTILINE)[:-1] for text in texts)
            yield Mutation(name, path, old, new, tests)


MUTATIONS = list(_listed())


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

"""``python -m tests.benchmarks.others pfl|flower``: the work of ``cifar`` in other systems.

It needs ``pip install 'pfl[pytorch]'`` or ``pip install -e '.[flower]'``. The data, the network and
the steps are those of :mod:`tests.benchmarks.cifar`, and the images lie on the device, too.
"""

import argparse
import functools
import os
import socket
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.benchmarks import sides
from tests.benchmarks.cifar import BATCH, COHORT, RATE, TwoConvs
from tests.benchmarks.gpu import Gpu
from tests.benchmarks.sides import report

CLIENTS, SAMPLES = 1000, 50


class Marks:
    """The time before round 1 and after each round."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.gpu = Gpu().__enter__()

    def mark(self) -> None:
        if sides.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def report(self, name: str) -> None:
        """Print the seconds per round, without the first one, which starts the libraries."""
        seconds = [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]
        report("", **{name: seconds})
        print(f"    {name}{self.gpu.summary()}", flush=True)


@functools.cache  # once per process: Flower's actors keep it between clients
def images() -> tuple[Tensor, Tensor]:
    """Return random images ``(clients, samples, 3, 32, 32)`` in [0, 1], and their classes."""
    draws = torch.Generator().manual_seed(0)
    shape = (CLIENTS, SAMPLES, 3, 32, 32)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draws)
    y = torch.randint(0, 10, (CLIENTS, SAMPLES), generator=draws)
    return x.to(sides.device).float() / 255, y.to(sides.device)


@functools.cache
def network() -> nn.Module:
    """Return the network, one per process."""
    torch.manual_seed(0)
    return TwoConvs().build((3, 32, 32), 10).to(sides.device)


class _Task(nn.Module):
    """The network as pfl-research wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}  # spares the two evaluations per client of round 1


def pfl(rounds: int, processes: int) -> None:
    """Run pfl-research, in processes of its own that may share a GPU."""
    rank = _pfl_rank(processes)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    (x, y), marks = images(), Marks()

    class Rounds(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Any:
            marks.mark()
            return Metrics()

        def after_central_iteration(self, *args: Any, **kwargs: Any) -> Any:
            marks.mark()
            return False, Metrics()

    def user(client: int) -> Any:
        order = torch.randperm(SAMPLES)
        return PyTorchTensorDataset((x[client][order], y[client][order]), user_id=client)

    task = _Task()
    server = torch.optim.SGD(task.parameters(), lr=1.0)
    users = FederatedDataset(user, MinimizeReuseUserSampler(range(CLIENTS)))
    params = NNAlgorithmParams(
        central_num_iterations=rounds + 1, evaluation_frequency=rounds + 2,
        train_cohort_size=COHORT, val_cohort_size=0,
    )  # fmt: skip
    steps = NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE)
    backend = SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()])
    model = PyTorchModel(task, torch.optim.SGD, central_optimizer=server)
    FederatedAveraging().run(
        params, backend, model, steps, callbacks=[Rounds()], send_metrics_to_platform=False
    )
    if rank == 0:
        marks.report(f"pfl_{processes}")


def _pfl_rank(processes: int) -> int:
    """Return the rank of this process, before pfl is imported, and start the others."""
    os.environ["PFL_PYTORCH_DEVICE"] = sides.device
    if processes == 1:
        return 0
    if "PFL_WORKER_RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        os.environ |= {
            "PFL_WORKER_ADDRESSES": ",".join([address] * processes),
            "LOCAL_RANK": "0",
            "PFL_WORKER_RANK": "0",
        }
        for rank in range(1, processes):
            environment = {**os.environ, "PFL_WORKER_RANK": str(rank)}
            command = [sys.executable, "-m", "tests.benchmarks.others", *sys.argv[1:]]
            subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    # pfl takes NCCL on GPUs, which refuses several processes on one GPU.
    make = torch.distributed.init_process_group

    def with_gloo(backend: str | None = None, **kwargs: Any) -> None:
        make("gloo", **kwargs)

    torch.distributed.init_process_group = with_gloo
    return int(os.environ["PFL_WORKER_RANK"])


def train(message: Any, context: Any) -> Any:
    """Train one client in an actor of Flower's simulation."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    sides.device = message.content["config"]["device"]
    (x, y), net, client = images(), network(), context.node_config["partition-id"]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for batch in torch.randperm(SAMPLES).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(net(x[client][batch]), y[client][batch]).backward()
        optimizer.step()
    arrays = ArrayRecord({name: value.cpu() for name, value in net.state_dict().items()})
    metrics = MetricRecord({"num-examples": SAMPLES})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def flower(rounds: int, processes: int) -> None:
    """Run Flower's simulation engine, with so many actors."""
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, marks = ClientApp(), ServerApp(), Marks()
    client_app.train()(train)

    @server_app.main()
    def serve(grid: Any, context: Any) -> None:
        start = {name: value.cpu() for name, value in network().state_dict().items()}
        strategy = FedAvg(
            fraction_train=COHORT / CLIENTS, min_train_nodes=COHORT, fraction_evaluate=0.0,
            min_available_nodes=CLIENTS,
        )  # fmt: skip
        strategy.start(
            grid, ArrayRecord(start), num_rounds=rounds + 1,
            train_config=ConfigRecord({"device": sides.device}),
            evaluate_fn=lambda _, arrays: marks.mark(),
        )  # fmt: skip

    has_gpu = sides.device == "cuda"
    share = 1 / processes if has_gpu else 0.0
    run_simulation(
        server_app, client_app, num_supernodes=CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": share},
            "init_args": {"num_cpus": processes, "num_gpus": int(has_gpu)},
        },
    )  # fmt: skip
    marks.report(f"flower_{processes}")


def main() -> None:
    systems = {"pfl": pfl, "flower": flower}
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.others", description=__doc__)
    parser.add_argument("system", choices=systems)
    parser.add_argument("--processes", type=int, default=2, help="processes that train")
    parser.add_argument("--rounds", type=int, default=8, help="rounds after the first one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    sides.device = options.device
    torch.set_num_threads(1)
    systems[options.system](options.rounds, options.processes)


if __name__ == "__main__":
    from tests.benchmarks import others  # by this name, other processes can import it

    others.main()

"""CMGA for Flower clients of one's own: plain PyTorch on the nodes, a flsuite rule on the server.

Digits are mapped to a plane by an encoder that stays on each client and a mapper that is averaged.
Each class has a Gaussian in the plane, whose centre and spread CMGA aggregates over the clients
that hold the class. Run it with ``flwr run configs/flower/own_clients --stream``.
"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits
from torch import Tensor, nn

from flsuite.aggregators import CMGA
from flsuite.flower.rule_strategy import CLASS_COUNTS, RuleStrategy

CLASSES = 10
GROUPS = {"prior_mean": ["mean"], "prior_log_variance": ["log_variance"]}


class Model(nn.Module):
    """An encoder, a mapper, and one Gaussian per class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.mapper = nn.Linear(32, 8)
        self.mean = nn.Parameter(torch.randn(CLASSES, 8))
        self.log_variance = nn.Parameter(torch.zeros(CLASSES, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the log density of each class, ``(n, classes)``."""
        gap = self.mapper(self.encoder(x))[:, None] - self.mean
        return -0.5 * (gap.square() / self.log_variance.exp() + self.log_variance).sum(2)


def shared(model: Model) -> ArrayRecord:
    """Return what travels: everything but the encoder."""
    own = {k: v for k, v in model.state_dict().items() if not k.startswith("encoder.")}
    return ArrayRecord(own)


def samples_of(context: Context) -> tuple[Tensor, Tensor]:
    """Return a client's digits. Each client holds six classes at most, and they overlap."""
    number, clients = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    own = torch.isin(y, torch.arange(number * CLASSES // clients, CLASSES)[:6])
    return x[own].float() / 16, y[own]


client_app = ClientApp()


@client_app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Train the received model with this client's encoder."""
    torch.manual_seed(0)
    model, (x, y) = Model(), samples_of(context)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict(), False)
    if "encoder" in context.state.array_records:
        model.encoder.load_state_dict(context.state.array_records["encoder"].to_torch_state_dict())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    context.state["encoder"] = ArrayRecord(model.encoder.state_dict())
    numbers = {
        "num-examples": len(y),
        CLASS_COUNTS: torch.bincount(y, minlength=CLASSES).tolist(),
        "loss": float(loss),
        "train_accuracy": float((model(x).argmax(1) == y).float().mean()),
    }
    content = {"arrays": shared(model), "metrics": MetricRecord(numbers)}
    return Message(RecordDict(content), reply_to=message)


server_app = ServerApp()


@server_app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    torch.manual_seed(0)
    strategy = RuleStrategy(CMGA(), GROUPS, fraction_evaluate=0.0)
    rounds = int(context.run_config["rounds"])
    result = strategy.start(grid, shared(Model()), num_rounds=rounds)
    print(result.train_metrics_clientapp[rounds])

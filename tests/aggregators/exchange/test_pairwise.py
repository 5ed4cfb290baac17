"""Secure aggregation: what the server receives, the sum itself, dropouts, and refusals."""

import dataclasses
import pickle
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flsuite.aggregators import PairwiseMasks, SumReport
from flsuite.aggregators.exchange.pairwise import _PairwiseParties
from flsuite.aggregators.exchange.pairwise_client import PairwiseClient
from flsuite.aggregators.exchange.pairwise_server import (
    MaskedVector,
    Maxima,
    PairwiseServer,
    PublicKeys,
    RevealedShares,
    SealedShares,
)
from flsuite.aggregators.exchange.sharing import (
    add_keystream,
    add_pair_mask,
    combine,
    decode_sum,
    encode_values,
    point_of,
    step,
    weights_at_zero,
)
from flsuite.common.errors import FederationError, FlsuiteError

State = dict[str, Tensor]
CLIENTS = (0, 2, 3, 7, 11)


def contribution(client: int, size: int = 40) -> State:
    generator = torch.Generator().manual_seed(client)
    return {
        "state/w": torch.randn(size, 3, generator=generator, dtype=torch.float64) * 10,
        "fisher/w": torch.rand(7, generator=generator) * 1e-4,
        "state/b": torch.randn((), generator=generator),
    }


def configured(clients: int = len(CLIENTS), **arguments: Any) -> PairwiseMasks:
    masks = PairwiseMasks(**arguments)
    masks.configure(contribution(0), clients)
    return masks


def run(
    masks: PairwiseMasks, arrived: Iterable[int] = CLIENTS, clients: Iterable[int] = CLIENTS
) -> tuple[_PairwiseParties, State, SumReport]:
    """Return the parties of a round, the sums, and their cost."""
    parties = holding(masks, arrived, clients)
    return parties, *parties.finish(set(arrived))


def holding(
    masks: PairwiseMasks, arrived: Iterable[int] = CLIENTS, clients: Iterable[int] = CLIENTS
) -> _PairwiseParties:
    """Return the parties of a round whose arrived clients have trained."""
    parties = masks.begin(list(clients))
    for client in arrived:
        parties.hold(client, contribution(client))
    return parties


def plain_sum(arrived: Iterable[int], clients: int = len(CLIENTS)) -> State:
    """Return the sum of the integers modulo 2^32, decoded, without any mask."""
    states = [contribution(client) for client in arrived]
    sums = {}
    for name in states[0]:
        largest = max(float(state[name].abs().max()) for state in states)
        total = np.zeros(states[0][name].numel(), np.uint32)
        for state in states:
            total += encode_values(state[name], largest, clients)
        sums[name] = decode_sum(total, largest, clients).reshape(states[0][name].shape)
    return sums


def assert_equal(a: State, b: State) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == torch.float64
        assert torch.equal(a[name], b[name])


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of all messages that a server receives in this test."""
    messages: list[Any] = []
    take = PairwiseServer.receive

    def record(self: PairwiseServer, message: Any) -> None:
        copied = {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in vars(message).items()
        }
        messages.append(dataclasses.replace(message, **copied))
        take(self, message)

    monkeypatch.setattr(PairwiseServer, "receive", record)
    return messages


def vectors(messages: list[Any]) -> dict[int, np.ndarray]:
    return {m.client: m.vector for m in messages if isinstance(m, MaskedVector)}


def codes(client: int, ranges: tuple[float, ...]) -> np.ndarray:
    """Return the integers of a client's contribution, without masks."""
    named = zip(contribution(client).values(), ranges, strict=True)
    return np.concatenate([encode_values(value, r, len(CLIENTS)) for value, r in named])


def test_the_sum_is_the_plain_modular_sum_bit_for_bit_with_any_keys() -> None:
    expected = plain_sum(CLIENTS)
    for masks in (configured(), pickle.loads(pickle.dumps(configured()))):
        _, sums, _ = run(masks)
        assert_equal(sums, expected)

    exact = {n: sum(contribution(c)[n].double() for c in CLIENTS) for n in expected}
    for name, value in expected.items():
        largest = max(float(contribution(c)[name].abs().max()) for c in CLIENTS)
        error = float((value - exact[name]).abs().max())
        assert error <= len(CLIENTS) * step(largest, len(CLIENTS)) / 2 * (1 + 1e-6)


def survivor_sets(threshold: int) -> list[tuple[int, ...]]:
    return [s for n in range(threshold, len(CLIENTS) + 1) for s in combinations(CLIENTS, n)]


@pytest.mark.parametrize("survivors", survivor_sets(3))
def test_any_dropouts_above_the_threshold_are_recovered(survivors: tuple[int, ...]) -> None:
    _, sums, report = run(configured(), survivors)
    assert_equal(sums, plain_sum(survivors))
    assert report.survivors == survivors
    assert report.dropped == tuple(c for c in CLIENTS if c not in survivors)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_below_the_threshold_the_round_fails_in_words(count: int) -> None:
    parties = holding(configured(), CLIENTS[:count])
    with pytest.raises(FederationError, match=f"{count} of 5 clients came back"):
        parties.finish(CLIENTS[:count])


def test_clients_that_are_gone_after_masking_are_in_the_sum() -> None:
    parties = holding(configured())
    sums, report = parties.finish(CLIENTS[:4], gone=CLIENTS[3:])
    assert_equal(sums, plain_sum(CLIENTS[:4]))
    assert report.survivors == CLIENTS[:4]
    assert [c for c in CLIENTS if report.costs[c].sent["unmasking"]] == list(CLIENTS[:3])

    parties = holding(configured())
    with pytest.raises(FederationError, match="2 of 5 clients revealed their shares, but 3"):
        parties.finish(CLIENTS, gone=CLIENTS[2:])


def test_the_server_receives_nothing_that_is_or_reveals_a_contribution(received: list[Any]) -> None:
    size, survivors, runs = 4000, CLIENTS[:4], []
    masks = PairwiseMasks(ranges={"state/": 100.0, "fisher/": 1.0})
    masks.configure(contribution(0, size), len(CLIENTS))
    for _ in range(2):
        received.clear()
        parties = masks.begin(CLIENTS)
        for client in survivors:
            parties.hold(client, contribution(client, size))
        sums, _ = parties.finish(survivors)
        runs.append((vectors(received), sums))

    kinds = {type(message) for message in received}
    assert kinds == {PublicKeys, SealedShares, MaskedVector, RevealedShares}  # and no maxima
    assert_equal(runs[0][1], runs[1][1])
    for client in survivors:
        first, second = (run[0][client] for run in runs)
        own = torch.cat([value.double().flatten() for value in contribution(client, size).values()])
        assert np.mean(first == second) < 0.001
        for vector in (first, second, first - second):
            # Uniform: each byte of the numbers has all values equally often, up to chance. The
            # statistic has the mean 255 and the standard deviation 23.
            for place in range(4):
                counts = np.bincount(vector.view(np.uint8)[place::4], minlength=256)
                expected = len(vector) / 256
                assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 23
            with_own = np.corrcoef(vector.astype(np.float64), own.numpy())[0, 1]
            assert abs(with_own) < 6 / len(vector) ** 0.5
    # No two clients share a mask.
    for a, b in combinations(survivors, 2):
        assert np.mean(runs[0][0][a] == runs[0][0][b]) < 0.001


def test_the_server_holds_no_secret_of_a_client(received: list[Any]) -> None:
    parties, _, _ = run(configured())
    before_unmasking = [m for m in received if not isinstance(m, RevealedShares)]
    for content in (pickle.dumps(parties.server), pickle.dumps(before_unmasking)):
        for client, device in parties._devices.items():
            for secret in (device._seed, device._masking_key, device._sealing_key):
                assert secret not in content
            whole = np.concatenate([v.numpy().reshape(-1) for v in contribution(client).values()])
            assert whole[:2].astype(np.float64).tobytes() not in content
            assert codes(client, parties.server.ranges())[:2].tobytes() not in content


def test_maxima_are_all_that_is_told_in_the_clear_and_named_ranges_tell_nothing(
    received: list[Any],
) -> None:
    run(configured())
    told = {m.client: m.values for m in received if isinstance(m, Maxima)}
    expected = {c: tuple(float(v.abs().max()) for v in contribution(c).values()) for c in CLIENTS}
    assert told == expected

    received.clear()
    _, sums, _ = run(configured(ranges={"state/w": 50.0, "*": 10.0}))
    assert not [m for m in received if isinstance(m, Maxima)]
    for name, largest in {"state/w": 50.0, "fisher/w": 10.0, "state/b": 10.0}.items():
        total = sum(encode_values(contribution(c)[name], largest, 5) for c in CLIENTS)
        assert torch.equal(sums[name].flatten(), decode_sum(total, largest, 5))


def test_the_report_has_the_bytes_of_every_phase() -> None:
    _, _, report = run(configured(), CLIENTS[:4])
    numbers = 40 * 3 + 7 + 1
    for client in CLIENTS[:4]:
        cost = report.costs[client]
        # A number, such as a client's, counts eight. Shares are two times 33 bytes and a seal.
        assert cost.sent == {
            "keys": 8 + 2 * 32,
            "shares": 8 + 4 * (8 + 2 * 33 + 16),
            "maxima": 8 + 3 * 8,
            "masked": 8 + 4 * numbers,
            "unmasking": 8 + 5 * (8 + 33),
        }
        assert cost.received["masked"] == 3 * 8
        assert cost.received["shares"] > 5 * 2 * 32 + 4 * (2 * 33 + 16)
        assert cost.seconds > 0
    assert set(report.costs[CLIENTS[4]].sent) == {"keys", "shares"}
    assert report.server_seconds > 0


def test_contributions_that_cannot_be_summed_are_refused_on_the_client() -> None:
    parties = configured(ranges={"state/": 1e6, "fisher": 1.0}).begin(CLIENTS)
    good = contribution(0)
    for bad, match in (
        ({**good, "state/w": good["state/w"] * 1e9}, r"entry state/w has .* outside .* raise it"),
        ({**good, "state/b": good["state/b"] * float("nan")}, "state/b is not finite"),
        ({**good, "state/b": torch.tensor(3)}, "state/b is torch.int64 of shape"),
        ({**good, "state/w": torch.zeros(2, 2)}, "state/w is torch.float32 of shape"),
        ({**good, "more": torch.zeros(2)}, "unknown entries more"),
        ({"state/w": good["state/w"]}, "lacks fisher/w, state/b"),
    ):
        with pytest.raises(ValueError, match=match):
            parties.hold(0, bad)
    with pytest.raises(FederationError, match="client 0 refuses to go on"):
        parties._devices[0].masked((1.0, 1.0, 1.0))


def test_a_client_refuses_what_would_uncover_it() -> None:
    parties = configured().begin(CLIENTS)
    device, public = parties._devices[0], parties.server.public
    fresh = PairwiseClient(0, contribution(0))
    own = {**public, 0: fresh.public_keys()}
    for keys, threshold, match in (
        (public, 3, "its own keys are missing"),
        ({**own, 2: dataclasses.replace(own[3], client=2)}, 3, "two keys are the same"),
        (own, 2, "a threshold of 2 of 5 is not a majority"),
        (own, 6, "not a majority"),
    ):
        with pytest.raises(FederationError, match=match):
            fresh.share(keys, threshold)
    fresh.share(own, 3)
    with pytest.raises(FederationError, match="shares of 1 others, too few"):
        fresh.collect({2: b""})
    with pytest.raises(FederationError, match="no shares of the others, and so no masks"):
        fresh.masked((1.0, 1.0, 1.0))

    for survivors, match in (
        ((2, 3, 7), "not in the cohort"),
        ((0, 2, 99), "not in the cohort"),
        ((0, 2), "2 clients came back, fewer"),
    ):
        with pytest.raises(FederationError, match=match):
            device.reveal(survivors)
    device.reveal((0, 2, 3))
    with pytest.raises(FederationError, match="it has revealed its shares already"):
        device.reveal((0, 7, 11))

    # A range that is too small would wrap around.
    other = parties._devices[2]
    other.hold(contribution(2))
    with pytest.raises(ValueError, match=r"entry state/w: .* outside its range of 1e-05"):
        other.masked((1e-5, 1e-5, 1e-5))


def test_the_server_refuses_messages_of_another_form() -> None:
    parties = holding(configured())
    server, devices = parties.server, parties._devices
    for client in CLIENTS:
        parties.ask("maxima", client, PairwiseClient.maxima)
    size, key = 128, b"k" * 32
    for bad, match in (
        (PublicKeys(99, key, key), "client 99 is not in the cohort"),
        (PublicKeys(0, key, key), "already sent one"),
        (SealedShares(0, {}), "already sent one"),
        (Maxima(0, (1.0, 1.0, 1.0)), "already sent one"),
        (MaskedVector(0, np.zeros(size - 1, np.uint32)), "128 numbers of type uint32"),
        (MaskedVector(0, np.zeros(size, np.int64)), "128 numbers of type uint32"),
        (RevealedShares(0, {}, {}), "one share per client"),
    ):
        with pytest.raises(ValueError, match=match):
            server.receive(bad)

    survivors = CLIENTS[:4]
    for client in survivors:
        parties.ask("masked", client, PairwiseClient.masked, server.ranges())
    with pytest.raises(ValueError, match="already sent one"):
        server.receive(MaskedVector(0, np.zeros(size, np.uint32)))
    good = devices[0].reveal(survivors)
    for bad in (
        dataclasses.replace(good, client=CLIENTS[4]),
        dataclasses.replace(good, seeds={**good.seeds, 0: b"short"}),
        dataclasses.replace(good, seeds={**good.seeds, 11: bytes(33)}),
        dataclasses.replace(good, keys={}),
    ):
        with pytest.raises(ValueError, match="one share per client"):
            server.receive(bad)
    server.receive(good)
    with pytest.raises(ValueError, match="uint32 are expected now"):
        server.receive(MaskedVector(CLIENTS[4], np.zeros(size, np.uint32)))

    # A share that was changed does not give the key that the client has announced.
    for client in survivors[1:]:
        reply = devices[client].reveal(survivors)
        server.receive(dataclasses.replace(reply, keys={11: (5).to_bytes(33, "big")}))
    with pytest.raises(FederationError, match="secure aggregation: the shares of client 11"):
        server.total()


def test_clients_without_shares_are_not_part_of_the_masks() -> None:
    """Two of five send their keys and are gone before they share them."""
    devices = {c: PairwiseClient(c, contribution(0)) for c in CLIENTS}
    server, alive = PairwiseServer(CLIENTS, 3, (120, 7, 1)), CLIENTS[:3]
    for device in devices.values():
        server.receive(device.public_keys())
    for client in alive:
        server.receive(devices[client].share(server.public, 3))
    for client in alive:
        devices[client].collect(server.inbox(client))
        devices[client].hold(contribution(client))
        server.receive(devices[client].maxima())
    for client in alive:
        server.receive(devices[client].masked(server.ranges()))
    for client in alive:
        server.receive(devices[client].reveal(alive))
    assert np.array_equal(server.total(), sum(codes(c, server.ranges()) for c in alive))


@pytest.mark.parametrize(
    ("threshold", "clients", "needed"),
    [(0.5, 2, 2), (0.5, 5, 3), (0.5, 30, 16), (2 / 3, 30, 21), (0.99, 5, 5), (3, 5, 3), (5, 5, 5)],
)
def test_the_threshold_is_a_number_or_more_than_a_share(
    threshold: float, clients: int, needed: int
) -> None:
    parties = configured(clients, threshold=threshold).begin(range(clients))
    assert parties.server.threshold == needed


@pytest.mark.parametrize("threshold", [0, 1, -2, 0.49, 1.0, 1.5, float("nan")])
def test_a_threshold_out_of_bounds_is_refused(threshold: float) -> None:
    with pytest.raises(FlsuiteError, match="PairwiseMasks: threshold must be"):
        PairwiseMasks(threshold=threshold)


def test_cohorts_that_the_threshold_does_not_fit_are_refused() -> None:
    for clients, threshold, match in (
        (4, 2, "threshold 2 is not a majority of 4"),
        (2, 3, "2 clients take part, but 3 are needed"),
        (1, 0.5, "1 client takes part, .* let at least 2"),
    ):
        with pytest.raises(FlsuiteError, match=match):
            configured(clients, threshold=threshold)
    masks = configured(5, threshold=4)
    for cohort, match in (((1, 2, 3), "3 clients take part, but 4"), ((1,), "1 client takes")):
        with pytest.raises(FederationError, match=match):
            masks.begin(cohort)


def test_ranges_that_do_not_fit_the_contributions_are_refused() -> None:
    for ranges, match in (
        ({"state": 1.0}, "no pattern of ranges matches fisher/w"),
        ({"*": 1.0, "typo": 1.0}, "'typo' of ranges matches no entry"),
        *(({"w": bad}, r"ranges\['w'\] must be positive") for bad in (0.0, -1.0, float("inf"))),
        ("minima", "ranges must be a mapping or one of maxima"),
    ):
        with pytest.raises(FlsuiteError, match=match):
            configured(ranges=ranges)


def test_what_is_revealed_leaves_every_single_vector_masked(received: list[Any]) -> None:
    """After unmasking, the server knows the seeds of survivors and the keys of dropouts."""
    survivors, late = CLIENTS[:3], CLIENTS[3]
    parties, _, _ = run(configured(), survivors)
    server, ranges = parties.server, parties.server.ranges()
    replies = {m.client: m for m in received if isinstance(m, RevealedShares)}
    for reply in replies.values():  # never both for one client
        assert set(reply.seeds) == set(survivors)
        assert set(reply.keys) == set(CLIENTS) - set(survivors)
    weights = weights_at_zero([point_of(client) for client in replies])

    def secret(owner: int, kind: str) -> bytes:
        return combine({point_of(c): getattr(m, kind)[owner] for c, m in replies.items()}, weights)

    def remove_pair(vector: np.ndarray, client: int, dropped: int) -> None:
        public = server.public[client].masking
        add_pair_mask(vector, secret(dropped, "keys"), public, client, dropped, sign=-1)

    for client, vector in vectors(received).items():
        add_keystream(vector, secret(client, "seeds"), sign=-1)
        for dropped in set(CLIENTS) - set(survivors):
            remove_pair(vector, client, dropped)
        assert np.mean(vector == codes(client, ranges)) < 0.05

    # The vector of a client that comes back too late: its pairwise masks are known by now.
    device = parties._devices[late]
    device.hold(contribution(late))
    limits = tuple(1e6 for _ in ranges)
    vector = device.masked(limits).vector
    for other in set(CLIENTS) - {late}:
        public = server.public[other].masking
        add_pair_mask(vector, secret(late, "keys"), public, late, other, sign=-1)
    assert np.mean(vector == codes(late, limits)) < 0.05
    # Its own mask is all that hides it.
    add_keystream(vector, device._seed, sign=-1)
    assert np.array_equal(vector, codes(late, limits))

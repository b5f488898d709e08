"""Workers crash, come back and come late; the others go on."""

import pytest
import torch

from gradwire.architecture.gossip import GOSSIP
from gradwire.core.key import Key

IN_ROUNDS = [algorithm.examples[0] for algorithm in GOSSIP if not algorithm.asynchronous]
KEEP_ESTIMATES = ("choco(0.3)", "dcd", "ecd")
COMPRESSED = {"choco(0.3)": "topk(0.3)", "dcd": "qsgd(6)", "ecd": "qsgd(8)"}


def speeds(rank, step):
    """Different workers are slow in different steps: 2 to 6 ms."""
    return 0.002 + 0.001 * ((rank * 3 + step * 5) % 5)


def estimates_agree(result, num_workers):
    for rank, replica in enumerate(result.replicas):
        for other in ((rank + 1) % num_workers, (rank - 1) % num_workers):
            held = result.replicas[other].memory.get(f"estimate {rank}")
            assert held is not None
            assert torch.equal(held, replica.memory["estimate"])


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_the_others_go_on_without_a_lost_worker(algorithm, train, vectors):
    x = vectors(5)
    result = train(
        f"gossip(ring, {algorithm}, lazy=True)",
        kicks=x,
        steps=60,
        seconds=speeds,
        faults=["crash(2, at=0.021)"],
    )
    assert result.replicas[2] is None
    assert result.params.shape[0] == 4
    # A path of four that agrees, on something not far from where it was.
    spread = result.params - result.params.mean(0)
    assert spread.abs().max() < 0.1 * x.abs().max()


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [*IN_ROUNDS, "adpsgd"])
@pytest.mark.parametrize("away_s", [0.0015, 0.004, 0.03])
def test_a_worker_comes_back_at_any_time(algorithm, away_s, train, vectors):
    b = vectors(5)
    for k in range(3):
        at = 0.0123 + 0.00371 * k
        result = train(
            f"gossip(ring, {algorithm}, lazy=True)",
            b=b,
            steps=16,
            lr=0.1,
            seconds=speeds,
            compression=COMPRESSED.get(algorithm, "identity"),
            synchronization="asp" if algorithm == "adpsgd" else "bsp",
            faults=[f"crash({k % 5}, at={at}, rejoin={at + away_s})"],
        )
        assert result.params.shape == b.shape
        assert result.params.abs().max() < 10
        if algorithm in KEEP_ESTIMATES:
            estimates_agree(result, 5)


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [*IN_ROUNDS, "adpsgd"])
def test_several_come_late_together(algorithm, train, vectors):
    b = vectors(5)
    faults = ["arrive(1, at=0.02)", "arrive(2, at=0.02)", "arrive(3, at=0.0207)"]
    for faulty in (faults, [*faults, "crash(1, at=0.0213, rejoin=0.025)"]):
        result = train(
            f"gossip(ring, {algorithm}, lazy=True)",
            b=b,
            steps=25,
            lr=0.1,
            seconds=speeds,
            compression=COMPRESSED.get(algorithm, "identity"),
            synchronization="asp" if algorithm == "adpsgd" else "bsp",
            faults=faulty,
        )
        assert result.params.shape == b.shape
        if algorithm in KEEP_ESTIMATES:
            estimates_agree(result, 5)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
def test_many_faults_and_no_deadlock(seed, train, vectors):
    graphs = ("ring", "complete", "one_peer_exponential", "matching", "torus", "exponential")
    draws = Key(seed).child("faults").uniform64(24).tolist()
    faults = ["loss(0.05, timeout=0.003)"]
    for rank in range(1, 6):
        at, away, again = draws[4 * rank : 4 * rank + 3]
        at, away = 0.05 * at, 0.02 * away + 0.0005
        faults.append(f"crash({rank}, at={at}, rejoin={at + away})")
        faults.append(f"crash({rank}, at={at + away + 0.01 * again + 0.0001})")
        if rank < 3:
            faults.pop()
    for algorithm in ("dpsgd", "sgp", "subgradient"):
        for sync in ("bsp", "localsgd(3)"):
            result = train(
                f"gossip({graphs[seed]}, {algorithm})",
                b=vectors(6),
                steps=20,
                lr=0.1,
                seconds=speeds,
                synchronization=sync,
                faults=faults,
                cuts=[6, 15],  # where rounds end
            )
            assert torch.isfinite(result.params).all()


def test_a_worker_that_comes_back_has_a_current_model(train, vectors):
    b = vectors(4)
    result = train(
        "gossip(ring)",
        b=b,
        steps=60,
        lr=0.1,
        seconds=lambda rank, step: 0.01,
        faults=["crash(1, at=0.305, rejoin=0.4)"],
    )
    steps = sorted(step for rank, step in result.history if rank == 1)
    assert max(steps) == 59
    back = min(step for step in steps if step > 30)
    assert 38 <= back <= 42
    whole = train("gossip(ring)", b=b, steps=60, lr=0.1)
    assert torch.allclose(result.params, whole.params, atol=0.05)


def test_a_worker_comes_back_in_the_middle_of_a_round(train, vectors):
    b = vectors(4)
    result = train(
        "gossip(ring)",
        b=b,
        steps=32,
        lr=0.1,
        seconds=lambda rank, step: 0.01,
        synchronization="localsgd(8)",
        faults=["crash(1, at=0.045, rejoin=0.105)"],
    )
    steps = [step for rank, step in result.history if rank == 1]
    assert 10 in steps or 11 in steps  # it trains alone until the round that begins with 16
    assert max(steps) == 31
    assert "start" not in result.replicas[1].memory


def test_the_weight_of_the_lost_becomes_ones_own(train):
    # 0 - 1 - 2 in a ring of three; 2 is lost before the first round is over.
    x = torch.tensor([[3.0], [6.0], [9.0]], dtype=torch.float64)
    result = train("gossip(ring)", x, steps=1, faults=["arrive(2, at=10.0)"])
    # x_0 <- 2/3 * 3 + 1/3 * 6, x_1 <- 1/3 * 3 + 2/3 * 6: the mean of the two stays.
    assert torch.allclose(result.params, torch.tensor([[4.0], [5.0]]).double())


def test_sgp_keeps_what_it_cannot_give_away(train, vectors):
    x = vectors(4)
    result = train(
        "gossip(exponential, sgp)", x, b=x, steps=40, lr=0.0, faults=["arrive(3, at=99.0)"]
    )
    weights = [float(r.memory["push_weight"]) for r in result.replicas if r is not None]
    assert abs(sum(weights) - 3) < 1e-12
    assert torch.allclose(result.params, x[:3].mean(0).expand(3, -1), atol=1e-9)


def test_a_finished_worker_still_answers(train, vectors):
    # Rank 0 is far ahead of its neighbours by the end; the newcomer asks it last.
    x = vectors(3)
    result = train(
        "gossip(ring, adpsgd)",
        b=x,
        steps=5,
        lr=0.1,
        synchronization="asp",
        seconds=lambda rank, step: 1.0 if rank == 2 else 0.01,
        faults=["crash(1, at=0.02, rejoin=3.0)"],
    )
    assert result.params.shape == x.shape

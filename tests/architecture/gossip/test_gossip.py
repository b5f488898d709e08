"""What holds for every gossip algorithm."""

import warnings

import pytest
import torch

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.gossip import GOSSIP
from gradwire.architecture.gossip.choco import Choco
from gradwire.architecture.gossip.dpsgd import DPSGD
from gradwire.architecture.gossip.gossip import Gossip
from gradwire.architecture.graphs import GRAPHS
from gradwire.architecture.graphs.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.core.errors import GradwireWarning
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.protocols import Replica
from gradwire.core.spec import Spec

IN_ROUNDS = [
    example for algorithm in GOSSIP if not algorithm.asynchronous for example in algorithm.examples
]
GRAPH_EXAMPLES = [
    graph.examples[0] for graph in GRAPHS if not graph.examples[0].startswith("from_file")
]


def allowed(gossip, num_workers):
    try:
        gossip.check(num_workers)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_without_walks_the_average_is_kept_and_approached(algorithm, train, vectors):
    x = vectors(5)
    result = train(f"gossip(ring, {algorithm}, lazy=True)", kicks=x, steps=60)
    assert torch.allclose(result.params.mean(0), x.mean(0), atol=1e-12)
    spread = (result.params - x.mean(0)).abs().max()
    assert spread < 1e-2 * (x - x.mean(0)).abs().max()


@pytest.mark.parametrize("graph", GRAPH_EXAMPLES)
@pytest.mark.parametrize("algorithm", [*IN_ROUNDS, "adpsgd"])
def test_any_number_of_workers_comes_to_an_end(graph, algorithm, train, vectors):
    gossip = ARCHITECTURE.parse(f"gossip({graph}, {algorithm}, lazy=True)")
    tried = 0
    for num_workers in (2, 3, 8):
        if allowed(gossip, num_workers):
            x = vectors(num_workers, 2)
            sync = "asp" if algorithm == "adpsgd" else "bsp"
            result = train(gossip, b=x, steps=3, lr=0.1, synchronization=sync)
            assert result.params.shape == x.shape
            assert torch.isfinite(result.params).all()
            tried += 1
    assert tried or gossip.graph.varies or gossip.graph.directed


@pytest.mark.parametrize("graph", GRAPH_EXAMPLES)
def test_all_numbers_of_workers(graph, train, vectors):
    gossip = ARCHITECTURE.parse(f"gossip({graph})")
    for num_workers in range(1, 18):
        if allowed(gossip, num_workers):
            x = vectors(num_workers, 2)
            result = train(gossip, x, steps=2)
            assert torch.allclose(result.params.mean(0), x.mean(0), atol=1e-13)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_one_worker_alone_is_sgd(algorithm, train, vectors):
    x, b = vectors(1), vectors(2)[1:]
    result = train(f"gossip(ring, {algorithm})", x, b=b, steps=5, lr=0.1)
    expected = b + (x - b) * 0.9**5
    assert torch.allclose(result.params, expected, atol=1e-12)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_on_a_complete_graph_the_mean_follows_sgd(algorithm, train, vectors):
    # With equal curvatures the mean of the gradients is the gradient at the mean.
    b = vectors(4)
    gamma_one = "choco(1.0)" if algorithm.startswith("choco") else algorithm
    result = train(f"gossip(complete, {gamma_one})", b=b, steps=7, lr=0.2)
    expected = b.mean(0) * (1 - 0.8**7)
    assert torch.allclose(result.params.mean(0), expected, atol=1e-12)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_local_steps_of_period_one_are_bsp(algorithm, train, vectors):
    b = vectors(3)
    settings = {"b": b, "steps": 6, "lr": 0.1}
    bsp = train(f"gossip(ring, {algorithm})", **settings)
    local = train(f"gossip(ring, {algorithm})", synchronization="localsgd(1)", **settings)
    assert torch.equal(bsp.params, local.params)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_a_round_may_cross_segments(algorithm, train, vectors):
    b = vectors(3)
    settings = {"b": b, "steps": 10, "lr": 0.1}
    settings["synchronization"] = "localsgd(4)"
    whole = train(f"gossip(ring, {algorithm})", **settings)
    cut = train(f"gossip(ring, {algorithm})", cuts=[3, 5, 6], **settings)
    assert torch.equal(whole.params, cut.params)
    assert whole.params.abs().max() > 0.1


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_runs_are_replayed_on_other_networks(algorithm, train, vectors):
    result = train(f"gossip(ring, {algorithm})", vectors(3), steps=3, record=True)
    trace = result.engine.trace
    assert trace is not None
    assert trace.replayable


def test_bytes_are_those_of_the_messages(train, vectors):
    result = train("gossip(ring)", vectors(5), steps=3)
    # Two neighbours, six numbers of eight bytes and a header of eight.
    assert result.engine.ledger.total_bytes == 3 * 5 * 2 * (6 * 8 + 8)
    assert result.engine.ledger.total_messages == 3 * 5 * 2


def test_notation():
    assert ARCHITECTURE.parse("gossip(ring)") == Gossip(Ring(), DPSGD())
    assert ARCHITECTURE.parse("gossip(ring, choco(0.3))") == Gossip(Ring(), Choco(0.3))
    for text in Gossip.examples:
        parsed = ARCHITECTURE.parse(text)
        assert ARCHITECTURE.parse(repr(parsed)) == parsed
    for algorithm in GOSSIP:
        for text in algorithm.examples:
            assert repr(GOSSIP.parse(text)) == text
    with pytest.raises(ValueError, match="gossip algorithm"):
        ARCHITECTURE.parse("gossip(ring, dpsg)")


def test_abilities():
    assert ARCHITECTURE.parse("gossip(ring)").offers == ("mix",)
    assert ARCHITECTURE.parse("gossip(ring, adpsgd)").offers == ("mix_async",)
    with pytest.raises(ValueError, match="allreduce"):
        ARCHITECTURE.parse("gossip(ring)").group(Node(0, 2), "x")


def test_matrices_that_are_refused(given):
    with pytest.raises(ValueError, match=r"column 0 .* sums to 1\.5"):
        Gossip(given([0.5, 0.5], [1.0, 0.0])).check(2)
    with pytest.raises(ValueError, match="nothing reaches rank 0 from rank 1"):
        Gossip(given([1.0, 0.0], [0.0, 1.0])).check(2)
    with pytest.raises(ValueError, match=r"directed.*Take sgp"):
        ARCHITECTURE.parse("gossip(exponential, choco(0.5))").check(5)
    with pytest.raises(ValueError, match="changes from step to step"):
        ARCHITECTURE.parse("gossip(matching, choco(0.5))").check(4)
    with pytest.raises(ValueError, match=r"-0\.333333.*lazy=True"):
        ARCHITECTURE.parse("gossip(ring, d2)").check(4)
    ARCHITECTURE.parse("gossip(ring, d2, lazy=True)").check(4)
    ARCHITECTURE.parse("gossip(ring, d2)").check(3)


def check(algorithm, compression, numel=10_000):
    spec = Spec((numel,), torch.float32, tensors=(("weight", 0, numel, (numel,)),))
    gossip = ARCHITECTURE.parse(f"gossip(ring, {algorithm})")
    gossip.check_compression(lift(COMPRESSION.parse(compression), steps_per_epoch=10.0), spec)


@pytest.mark.parametrize(
    ("algorithm", "compression", "why"),
    [
        ("choco(0.5)", "ef(topk(0.1))", "keeps a memory for exchanges among all"),
        ("choco(0.5)", "ef21(topk(0.1))", "keeps a memory for exchanges among all"),
        ("choco(0.5)", "powersgd(2)", "averages over all workers at once"),
        ("choco(0.5)", 'partition({"*": "topk(0.1)"})', "has several parts"),
        ("d2", "topk(0.1)", r"no rule for a codec that loses.*choco"),
        ("adpsgd", "qsgd(4)", "no rule"),
        ("d2", "topk(ramp(1.0, 0.1, epochs=4))", "no rule"),
        ("choco(0.5)", "terngrad(share=True)", "no means"),
        ("choco(0.5)", "adacomp", "error feedback accumulates"),
        ("choco(0.5)", "signvote", "a single one is no model"),
        ("dpsgd", "signvote", "a single one is no model"),
        ("dcd", "topk(0.1) >> signvote", "a single one is no model"),
    ],
)
def test_compression_that_is_refused(algorithm, compression, why):
    with pytest.raises(ValueError, match=why):
        check(algorithm, compression)


def test_refusals_show_the_compression_as_it_was_written():
    written = "ef(topk(ramp(0.25, 0.01, epochs=4.0)))"
    with pytest.raises(ValueError, match="plain codec") as refusal:
        check("choco(0.5)", written)
    assert str(refusal.value).startswith(f"{written} with gossip(ring, algorithm=choco(0.5)): ")
    assert "topk(0.25)" not in str(refusal.value)


@pytest.mark.parametrize(
    ("algorithm", "compression", "why"),
    [
        ("dpsgd", "topk(0.1)", "what is lost never comes back.*choco"),
        ("dpsgd", "topk(ramp(1.0, 0.1, steps=9))", "what is lost never comes back"),
        ("dcd", "topk(0.1)", r"unbiased .* not one.*qsgd\(bits=8\), or gossip\(ring, choco"),
        ("ecd", "sign", "unbiased .* not one"),
        ("dcd", "terngrad", "unbiased .* not one"),  # it clips
        ("dcd", "threshold(0.1)", "not known to be one"),
        ("dcd", "randomk(0.01, unbiased=True)", r"up to 99 times.*diverge.*choco"),
        ("ecd", "qsgd(ramp(100, 1, steps=9))", "diverge"),
        ("choco(0.5)", "terngrad", r"without bound.*topk\(0\.01\)"),
        ("choco(0.5)", "terngrad(0.0)", "without bound"),
    ],
)
def test_compression_that_is_warned_of(algorithm, compression, why):
    with pytest.warns(GradwireWarning, match=why):
        check(algorithm, compression)


@pytest.mark.parametrize(
    ("algorithm", "compression"),
    [
        ("choco(0.5)", "topk(0.1)"),
        ("choco(0.5)", "topk(ramp(0.25, 0.01, epochs=4))"),
        ("choco(0.5)", "sign"),
        ("choco(0.5)", "qsgd(bits=8)"),
        ("choco(0.5)", "layerwise(topk(0.1))"),
        ("dcd", "qsgd(bits=8)"),
        ("dcd", "identity"),
        ("ecd", "lowprec(8)"),
        ("dpsgd", "identity"),
        ("d2", "topk(1.0)"),  # loses nothing
    ],
)
def test_compression_that_is_welcome(algorithm, compression):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(algorithm, compression)


def test_what_is_lossless_depends_on_the_size_of_the_model():
    # Of 1000 elements all are kept, of 100000 all but 10.
    check("d2", "topk(0.9999)", numel=1000)
    with pytest.raises(ValueError, match="no rule"):
        check("d2", "topk(0.9999)", numel=100_000)


def test_only_changes_are_owed():
    start = torch.zeros(3)
    for algorithm in GOSSIP:
        gossip = Gossip(Ring(), GOSSIP.parse(algorithm.examples[0]))
        replica = Replica(start, {}, {}, (), gossip.memory(start))
        moved = replica.having(params=torch.tensor([1.0, 0.0, -2.0]))
        owed = gossip.owed(moved)
        if algorithm.compresses == "by rule":
            assert torch.equal(owed, moved.params)
            assert not gossip.owed(replica).any()
        else:
            assert owed is None

"""Servers that hold the model: what is pushed and pulled, and what it costs."""

import io
from functools import partial
from itertools import pairwise

import pytest
import torch

from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, Kind
from gradwire.core.errors import GradwireWarning, WireError
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Framed, Membership, Node
from gradwire.core.notation import notation_name
from gradwire.core.spec import Spec
from gradwire.core.wire import ANSWER, HEADER_NBYTES, REQUEST, Failed
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.training.backward import PendingVector
from gradwire.training.program import rejoin
from gradwire.training.program import train as train_program
from gradwire.training.schedule import Step
from gradwire.training.server import TrainingServer
from gradwire.training.wire import JOINING, AnswerHeader, PullHeader, PushHeader
from gradwire.training.worker import TrainingWorker
from sampling import cover


def holding(servers: int = 1, answers: str = "dense") -> str:
    return f'parameter_server({servers}, optimizer="server", answers="{answers}")'


def whole(trained) -> torch.Tensor:
    return torch.cat([server.params for server in trained.servers])


@pytest.mark.few
@pytest.mark.parametrize("scheduling", ["sequential", 'sequential("layer")'])
@pytest.mark.parametrize("answers", ["dense", "compressed"])
def test_without_compression_workers_have_the_servers_model(train, answers, scheduling) -> None:
    settings = {"layers": (5, 1, 1, 30, 2), "momentum": 0.9, "scheduling": scheduling}
    expected = train("bsp", "allreduce", **settings)
    for servers in (1, 2, 3, 7):
        trained = train("bsp", holding(servers, answers), **settings)
        assert torch.equal(whole(trained), expected.params[0])
        for params in trained.params:
            assert torch.equal(params, expected.params[0])


@pytest.mark.parametrize(("servers", "scheduling"), [(1, "sequential"), (3, 'sequential("layer")')])
@pytest.mark.parametrize("compression", ["topk(0.3)", "ef(sign)"])
@pytest.mark.parametrize("synchronization", ["bsp", "asp", "ssp(2)"])
def test_servers_follow_what_workers_know(
    train, synchronization, compression, servers, scheduling
) -> None:
    trained = train(
        synchronization,
        holding(servers, "compressed"),
        compression,
        layers=(12, 3, 25),
        scheduling=scheduling,
        compute="exponential(0.01)",
        workers=3,
        steps=6,
    )
    for rank, params in enumerate(trained.params):
        for server, shard in zip(trained.servers, trained.plan.shards()):
            assert torch.equal(server._known[rank], params[shard.start : shard.stop])
    assert not torch.equal(whole(trained), trained.params[0])


def test_compressed_answers_lose_nothing_for_good(train) -> None:
    # All have the same minimum, so that gradients vanish and feedback dies out.
    minima, two = torch.arange(8.0).repeat(2, 1), {"workers": 2, "steps": 120}
    trained = train("bsp", holding(2, "compressed"), "ef(topk(0.3))", minima=minima, **two)
    torch.testing.assert_close(whole(trained), trained.optimum, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(trained.params[0], trained.optimum, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("answers", ["dense", "compressed"])
@pytest.mark.parametrize("synchronization", ["bsp", "asp", "ssp(2)", "r2sp"])
def test_the_model_and_what_feedback_owes_are_all_gradients(
    train, synchronization, answers
) -> None:
    trained = train(
        synchronization,
        holding(2, answers),
        "ef(topk(0.3))",
        layers=(12, 3, 25),
        scheduling='sequential("layer")',
        compute="exponential(0.01)",
        workers=3,
        steps=6,
    )
    total = torch.zeros(40, dtype=torch.float64)
    for rank, replica in enumerate(trained.replicas):
        for step in range(6):
            x = trained.after[rank, step - 1].params if step else trained.initial
            total += trained.gradient(rank, x)
        for state, unit in zip(replica.exchange, trained.plan.units()):
            total[unit.bucket.start : unit.bucket.stop] -= state["residual"]
    share = 1 if synchronization in ("asp", "r2sp") else 3  # of a worker in a step
    expected = trained.initial - 0.1 / share * total
    torch.testing.assert_close(whole(trained), expected, rtol=1e-6, atol=1e-6)


def can_be_pushed(text: str) -> bool:
    compression = COMPRESSION.parse(text)
    if "bias" in text:
        return False  # has rules for tensors that are not there
    if isinstance(compression, Codec) and (
        compression.traits.takes is not Kind.REAL or compression.traits.needs_feedback
    ):
        return False
    return lift(compression).can_push


COMPRESSIONS = [
    (text, cls) for cls in COMPRESSION for text in (cls.examples or (notation_name(cls),))
]


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore::gradwire.core.errors.GradwireWarning")
@pytest.mark.parametrize(
    "compression", cover(case for case in COMPRESSIONS if can_be_pushed(case[0]))
)
def test_every_codec_can_be_pushed_and_pulled(train, compression) -> None:
    settings = {"layers": (80, 30, 90), "workers": 2, "steps": 2, "compute": "exponential(0.01)"}
    trained = train("asp", holding(2), compression, **settings)
    assert any(torch.equal(params, whole(trained)) for params in trained.params)  # the last one
    if "share=True" in compression or compression.startswith("partition"):
        with pytest.raises(ValueError, match="one server alone"):
            train("asp", holding(2, "compressed"), compression, **settings)
        return
    trained = train("asp", holding(2, "compressed"), compression, **settings)
    for rank, params in enumerate(trained.params):
        for server, shard in zip(trained.servers, trained.plan.shards()):
            assert torch.equal(server._known[rank], params[shard.start : shard.stop])


def test_lost_messages_only_take_time(train) -> None:
    sure = train("bsp", holding(2), workers=3)
    unsure = train("bsp", holding(2), workers=3, faults=["loss(0.1)"])
    assert torch.equal(whole(sure), whole(unsure))
    assert unsure.time_s > sure.time_s


def test_the_bytes_are_those_of_messages_and_headers(train) -> None:
    codec = COMPRESSION.parse("fp16")
    settings = {"compression": "fp16", "layers": (80,), "workers": 3, "steps": 5}
    for servers in (1, 2):
        x = torch.zeros(80 // servers, dtype=torch.float64)
        payload, _ = codec.encode(x, codec.init(Spec.of(x)), Key(0))
        packed = (payload.buffer.numel() + HEADER_NBYTES) * servers
        whole = 80 * 8 + HEADER_NBYTES * servers
        trained = train("asp", holding(servers), **settings)
        assert trained.sent_bytes == 3 * 5 * (packed + whole)
        trained = train("asp", holding(servers, "compressed"), **settings)
        assert trained.sent_bytes == 3 * 5 * (packed + packed)


def test_a_worker_that_comes_back_gets_the_whole_model_once(train) -> None:
    trained = train(
        "asp",
        holding(2, "compressed"),
        "ef(topk(0.2))",
        workers=3,
        steps=40,
        faults=["crash(1, at=0.1, rejoin=0.2)"],
        heartbeat_s=0.05,
    )
    params = trained.params[1]
    for server, shard in zip(trained.servers, trained.plan.shards()):
        assert torch.equal(server._known[1], params[shard.start : shard.stop])


@pytest.mark.parametrize("synchronization", ["bsp", "asp", "localsgd(2)"])
def test_no_server_holds_nothing(train, synchronization) -> None:
    train(synchronization, "parameter_server(8)", steps=2)
    with pytest.raises(ValueError, match=r"only 8 parameters, so some servers would hold none"):
        train(synchronization, "parameter_server(9)")


def test_a_codec_that_needs_everyone_cannot_compress_answers(train) -> None:
    with pytest.raises(ValueError, match=r"terngrad.*one server alone.*answers=.dense"):
        train("bsp", holding(1, "compressed"), "terngrad(share=True)")


def test_a_codec_whose_errors_may_grow_is_warned_of(train) -> None:
    with pytest.warns(GradwireWarning, match=r"qsgd\(1\).*answers=.dense"):
        train("bsp", holding(1, "compressed"), "qsgd(1)", layers=(500,), steps=1)


def test_a_compression_that_changes_with_time_answers_with_that_of_the_step(train) -> None:
    compression = "ef(topk(ramp(0.9, 0.2, steps=6)))"
    trained = train("asp", holding(2, "compressed"), compression, workers=2, steps=12)
    for server, shard in zip(trained.servers, trained.plan.shards()):
        assert torch.equal(server._known[0], trained.params[0][shard.start : shard.stop])


@pytest.mark.parametrize("synchronization", ["asp", "ssp(1)", "bsp", "r2sp", "bsp(backup=1)"])
@pytest.mark.parametrize("workers", [1, 2, 7, 17])
def test_nobody_waits_forever(train, synchronization, workers) -> None:
    if workers == 1 and "backup" in synchronization:
        return
    for servers in (1, 3):
        trained = train(
            synchronization, holding(servers), workers=workers, steps=4, compute="exponential(0.01)"
        )
        assert all(torch.isfinite(params).all() for params in trained.params)


def test_a_gradient_that_is_not_finite_counts_as_zero(train) -> None:
    for synchronization in ("asp", "ssp(1)", "bsp", "r2sp"):
        trained = train(
            synchronization, holding(), workers=2, steps=3, bad=[(1, 1)], nonfinite="skip"
        )
        assert [replica.num_dropped for replica in trained.replicas] == [0, 1]
        assert torch.isfinite(whole(trained)).all()


def test_statistics_of_a_gradient_that_is_not_finite_are_not_kept(train) -> None:
    settings = {"workers": 2, "steps": 3, "bad": [(1, 1)], "nonfinite": "skip"}
    for synchronization in ("asp", "ssp(1)", "bsp", "r2sp", "bsp(backup=1)"):
        trained = train(synchronization, holding(), **settings)
        running = [trained.after[1, step].buffers["running"] for step in range(3)]
        assert running[0] == running[1] != running[2]
        assert torch.isfinite(running[2])
        assert trained.after[1, 1].loss == trained.after[1, 0].loss
        assert trained.replicas[1].num_gradients == 3


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(
    ("synchronization", "servers"),
    [("asp", 1), ("r2sp", 1), ("r2sp", 2), ("bsp", 2), ("ssp(0)", 2), ("bsp(timeout=9.0)", 2)],
)
def test_rates_are_those_of_the_step_and_workers_clip(
    train, synchronization, servers, clip_norm
) -> None:
    trained = train(
        synchronization,
        holding(servers),
        workers=2,
        steps=3,
        schedule=Step((1, 2), 0.5),
        clip_norm=clip_norm,
        drift=0.3,
        layers=(4, 4),
    )

    def pushed(rank: int, x: torch.Tensor, step: int) -> torch.Tensor:
        gradient = trained.gradient(rank, x, step)
        if clip_norm is None:
            return gradient
        assert gradient.norm() > clip_norm
        return gradient * clip_norm / gradient.norm()

    x, rates = trained.initial, [0.1, 0.05, 0.025]
    seen = [x, x]
    for step, rate in enumerate(rates):
        if synchronization in ("asp", "r2sp"):
            for rank in range(2):
                x = seen[rank] = x - rate * pushed(rank, seen[rank], step)
        else:
            x = x - rate * (pushed(0, x, step) + pushed(1, x, step)) / 2
            seen = [x, x]
    torch.testing.assert_close(whole(trained), x, rtol=1e-12, atol=1e-12)
    for own, expected in zip(trained.params, seen):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("synchronization", ["bsp", "fedavg(0.5, epochs=4.0)"])
@pytest.mark.parametrize("answers", ["dense", "compressed"])
def test_a_server_goes_on_from_a_snapshot(train, answers, synchronization) -> None:
    settings = {"steps": 7, "momentum": 0.9, "compression": "ef(topk(0.3))"}
    plan = train(synchronization, holding(2, answers), **settings).plan

    def trained(pauses: list[int]) -> torch.Tensor:
        replicas = plan.initial_replicas()
        saved: list[dict] = []
        engine = VirtualEngine(Network.uniform(7), 4, evaluate=plan.task.gradients)
        for first, last in pairwise([0, *pauses, 7]):
            servers = [TrainingServer(plan, number) for number in range(2)]
            for server, state in zip(servers, saved):
                server.restore(state)
            programs = [
                partial(train_program, plan, replica=r, first=first, last=last) for r in replicas
            ]
            scheduler = partial(plan.architecture.daemon, keep={})
            replicas = engine.run(programs, [*(server.run for server in servers), scheduler])
            file = io.BytesIO()
            torch.save([server.snapshot() for server in servers], file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        return torch.cat([state["params"] for state in saved])

    assert torch.equal(trained([]), trained([2, 3, 6]))


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (PushHeader(1, 0, 1, 0, True), torch.zeros(4)),  # a piece of another server
        (PushHeader(-1, 0, 1, 0, True), torch.zeros(4)),
        (PushHeader(0, 1, 1, 0, True), torch.zeros(4)),  # a part too many
        (PushHeader(0, -1, 1, 0, True), torch.zeros(4)),
        (PushHeader(0, 0, 0, 0, True), torch.zeros(4)),
        (PushHeader(0, 0, 1, -3, True), torch.zeros(4)),  # no such step
        (PushHeader(0, 0, 1, 0, True), None),
        (PushHeader(0, 0, 1, 0, True), torch.zeros(4, dtype=torch.uint8)),  # no payload
        (PushHeader(0, 0, 2, 0, True), torch.zeros(4, dtype=torch.uint8)),  # the same part twice
        (PushHeader(0, 0, 3, 0, True), torch.zeros(4, dtype=torch.uint8)),
        (PushHeader(0, 0, 1, 0, True, life=2.0), torch.zeros(4)),  # it did not say that it came
        (PushHeader(0, 0, 1, 0, True, life=float("nan")), torch.zeros(4)),
        (PullHeader(0, life=2.0), None),
        (PullHeader(0, life=-2.0), None),
        (PullHeader(-1, life=float("nan")), None),
        (PullHeader(-1, life=2.0), None),  # the same life begins twice
        (PullHeader(-7), None),
        ("hello", None),
        (None, torch.zeros(4)),
    ],
)
def test_a_server_refuses_what_makes_no_sense(train, header, data) -> None:
    plan = train("asp", holding(2), workers=1, steps=1).plan

    async def program(node: Node) -> None:
        for _ in range(2):
            if header is None:
                await node.send(1, REQUEST, data)
            else:
                await node.send_framed(1, REQUEST, Framed(header, data), HEADER_NBYTES)
        while not isinstance(answer := (await node.recv(1, ANSWER)).header, Failed):
            pass
        assert isinstance(answer.error(), WireError)
        assert "rank 0" in answer.text
        life = servers[0]._incarnations.get(0, 0.0)  # it goes on, also for this one
        await node.send_framed(1, REQUEST, Framed(PullHeader(0, life=life)), HEADER_NBYTES)
        while not isinstance((await node.recv(1, ANSWER)).header, AnswerHeader):
            pass

    servers = [TrainingServer(plan, number) for number in range(2)]
    programs = [server.run for server in servers]
    scheduler = [lambda node: plan.architecture.daemon(node, {})]
    with pytest.warns(GradwireWarning, match="rank 0") as warned:
        VirtualEngine(Network.uniform(4), 1).run([program], programs + scheduler)
    assert len(warned) == 1  # however often
    assert servers[0].refused[0] in (1, 2)
    assert not servers[1].refused


def test_only_the_scheduler_says_who_is_there_and_only_workers_ask(train) -> None:
    plan = train("asp", holding(2), workers=2, steps=1).plan

    async def program(node: Node) -> None:
        if node.rank == 0:
            await node.send_framed(2, REQUEST, Framed(Membership(1, False, 1.0)), HEADER_NBYTES)
            assert isinstance((await node.recv(2, ANSWER)).header, Failed)

    async def stranger(node: Node) -> None:
        await node.send_framed(2, REQUEST, Framed(PullHeader(0)), HEADER_NBYTES)
        await node.send_framed(2, REQUEST, Framed(Membership(7, True, 1.0)), HEADER_NBYTES)

    servers = [TrainingServer(plan, number) for number in range(2)]
    daemons = [*(server.run for server in servers), stranger]
    with pytest.warns(GradwireWarning, match="expected a push or a pull of a worker"):
        VirtualEngine(Network.uniform(5), 2).run([program] * 2, daemons)
    assert servers[0].members == {0, 1}
    assert servers[0].refused == {0: 1, 4: 2}


def test_who_asks_twice_is_refused_once_and_answered_once(train) -> None:
    plan = train("ssp(0)", holding(), workers=2, steps=1).plan
    x = torch.ones(8, dtype=torch.float64)

    async def program(node: Node) -> None:
        worker, replica = TrainingWorker(plan, node), plan.initial_replicas()[node.rank]
        if node.rank == 1:
            await node.sleep(1.0)
        await worker.client.push(PendingVector(worker, x, 0), replica, 0, True)
        if node.rank == 0:
            await worker.client.request_model(0)  # while it waits for the other one
            assert isinstance((await node.recv(2, ANSWER)).header, Failed)
        assert (await worker.client._receive_answer(2))[0].clock == 1

    daemons = [TrainingServer(plan, 0).run, lambda node: plan.architecture.daemon(node, {})]
    with pytest.warns(GradwireWarning, match="while it waits for an answer"):
        VirtualEngine(Network.uniform(4), 2).run([program] * 2, daemons)


@pytest.mark.parametrize("is_killed_again", [False, True])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("synchronization", ["ssp(0)", "ssp(1)", "r2sp"])
def test_nobody_is_answered_who_waited_when_the_run_was_interrupted(
    train, synchronization, first, is_killed_again
) -> None:
    plan = train(synchronization, holding(), workers=3, steps=6).plan
    x = torch.ones(8, dtype=torch.float64)

    async def program(node: Node) -> None:
        """Workers 1 and 2 push, and stop while they wait: worker 0 was not heard of."""
        if node.rank:
            worker, replica = TrainingWorker(plan, node), plan.initial_replicas()[node.rank]
            for step in range(getattr(plan.synchronization, "staleness", 0) + 1):
                if step:
                    await worker.client._receive_answer(3)
                await worker.client.push(PendingVector(worker, x, step), replica, step, True)

    async def coming_back(node: Node) -> torch.Tensor:
        await node.sleep(0.0 if node.rank == first else 5.0 + node.rank)
        replica = await rejoin(plan, node, 6)
        return replica.params

    server = TrainingServer(plan, 0)
    scheduler = partial(plan.architecture.daemon, keep={})
    VirtualEngine(Network.uniform(5), 3).run([program] * 3, [server.run, scheduler])
    assert server.snapshot()["owed"] == (1, 2)
    server.forget_workers()
    again = TrainingServer(plan, 0)
    again.restore(server.snapshot())
    if is_killed_again:
        again.forget_workers()
    engine = VirtualEngine(Network.uniform(5), 3, evaluate=plan.task.gradients)
    engine.run([coming_back] * 3, [again.run, scheduler])
    assert not again.snapshot()["void"]
    assert not again.snapshot()["owed"]
    assert not any(engine._mailboxes[rank].inbox for rank in range(3))


def test_a_server_does_not_keep_more_of_a_push_than_it_could_need(train) -> None:
    plan = train("asp", holding(), workers=1, steps=1).plan

    async def program(node: Node) -> None:
        for part in range(2):
            header = PushHeader(0, part, 3, 0, True)
            data = torch.zeros(40_000, dtype=torch.uint8)
            await node.send_framed(1, REQUEST, Framed(header, data), HEADER_NBYTES)
        failed = (await node.recv(1, ANSWER)).header
        assert isinstance(failed, Failed)
        assert "80000 bytes" in failed.text

    server = TrainingServer(plan, 0)
    daemons = [server.run, lambda node: plan.architecture.daemon(node, {})]
    with pytest.warns(GradwireWarning, match="80000 bytes"):
        VirtualEngine(Network.uniform(3), 1).run([program], daemons)
    assert not server.snapshot()["begun"]


@pytest.mark.parametrize(
    ("synchronization", "steps"),
    [
        (text, steps)
        for text in ("bsp", "ssp(0)", "ssp(3)", "r2sp", "bsp(backup=1)", "fedavg(1.0)")
        for steps in ((0, 0), (0, 2), (2,))
    ]
    + [("ssp(0)", (0, 1))],
)
def test_a_server_refuses_pushes_out_of_turn(train, synchronization, steps) -> None:
    # Worker 2 pushes before it has an answer, or a step that it cannot be at.
    plan = train(synchronization, holding(), workers=3, steps=3).plan

    async def program(node: Node) -> None:
        if node.rank < 2:
            return
        worker, replica = TrainingWorker(plan, node), plan.initial_replicas()[2]
        x, wants_answer = torch.ones(8, dtype=torch.float64), "fedavg" not in synchronization
        for step in steps:
            await worker.client.push(PendingVector(worker, x, step), replica, step, wants_answer)
        while True:
            await worker.client._receive_answer(3)

    daemons = [TrainingServer(plan, 0).run, lambda node: plan.architecture.daemon(node, {})]
    with (
        pytest.warns(GradwireWarning, match="rank 2"),
        pytest.raises(WireError, match="rank 2"),
    ):
        VirtualEngine(Network.uniform(5), 3).run([program] * 3, daemons)


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:rank 2")
@pytest.mark.parametrize("how", ["does not wait", "comes back", "pulls"])
@pytest.mark.parametrize(
    "synchronization",
    ["asp", "ssp(0)", "ssp(2)", "r2sp", "bsp(backup=1)", "fedavg(1.0)"],
)
def test_no_worker_fills_a_server_with_pushes(train, synchronization, how) -> None:
    """Worker 2 pushes all the time, while the others push nothing."""
    plan = train(synchronization, holding(), workers=3, steps=200).plan
    x = torch.ones(8, dtype=torch.float64)

    async def program(node: Node) -> None:
        if node.rank < 2:
            return
        for number in range(200):
            life = 1.0 + number if how == "comes back" else 0.0
            if how != "does not wait":
                pull = PullHeader(JOINING if how == "comes back" else 0, life)
                await node.send_framed(3, REQUEST, Framed(pull), HEADER_NBYTES)
            for step in (number,) if how == "does not wait" else (0, 1):
                key, state = plan.key.at(step).private(2), plan.initial_replicas()[2].exchange[0]
                pushed = await plan.reducer.push(x, state, key, node)
                header = PushHeader(0, 0, 1, step, False, life)
                framed = Framed(header, pushed.messages[0])
                await node.send_framed(3, REQUEST, framed, HEADER_NBYTES)

    server = TrainingServer(plan, 0)
    daemons = [server.run, lambda node: plan.architecture.daemon(node, {})]
    VirtualEngine(Network.uniform(5), 3).run([program] * 3, daemons)
    assert server.pushes[2] > 0
    kept = server.snapshot()
    assert not kept["begun"]
    # Some pushes of some steps, with their sums; not 200.
    assert _num_tensors(kept["memory"]) <= 40


def _num_tensors(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return 1
    inside = value.values() if isinstance(value, dict) else value
    return sum(map(_num_tensors, inside)) if isinstance(value, dict | tuple | list) else 0


@pytest.mark.few
@pytest.mark.parametrize(
    "synchronization",
    ["asp", "ssp(0)", "ssp(2)", "r2sp", "bsp(backup=1)", "bsp(timeout=0.1)", "fedavg(1.0)"],
)
def test_nobody_takes_an_answer_that_was_for_its_previous_life(train, synchronization) -> None:
    # Messages take 10 ms: when worker 1 is back after one, answers are still on their way to it.
    for number in range(12):
        at = 0.1 + 0.003 * number
        trained = train(
            synchronization,
            f"parameter_server({1 + number % 2})",
            workers=3,
            steps=14,
            latency="10ms",
            compute="exponential(0.01)",
            faults=[f"crash(1, at={at}, rejoin={at + 0.001})"],
            heartbeat_s=0.1,
        )
        for rank in range(3):
            assert (rank, 13) in trained.after
        assert not any(trained.engine._mailboxes[rank].inbox for rank in range(3))


def test_pushes_of_a_previous_life_do_not_count(train) -> None:
    # Both have sent a push when they crash and are back before it arrives: only the news of one is.
    trained = train(
        "asp",
        "parameter_server",
        workers=2,
        steps=1,
        latency="10ms,10ms,10ms,1us",
        faults=["crash(1, at=0.0105, rejoin=0.0106)"],
        heartbeat_s=1.0,
    )
    assert trained.servers[0].memory["updates"] == 2
    assert trained.replicas[1].num_gradients == 1


@pytest.mark.slow
def test_what_a_life_said_that_is_known_to_be_over_does_not_count(train) -> None:
    # Messages of worker 1 take 30 ms, news of it nothing: of its second life, which lasts 5 ms,
    # all is known before it is heard. The third never ends, or there is none.
    settings = {
        "workers": 3,
        "compute": "exponential(0.01)",
        "latency": "1us,30ms,1us,1us,1us,1us",
        "heartbeat_s": 0.002,
    }
    for second in ("crash(1, at=0.125)", "crash(1, at=0.125, rejoin=0.13)"):
        faults = ["crash(1, at=0.1, rejoin=0.12)", second, "crash(2, at=0.5)"]
        for synchronization in ("asp", "ssp(1)", "r2sp", "bsp(timeout=0.1)", "fedavg(1.0)"):
            trained = train(
                synchronization, "parameter_server(2)", faults=faults, steps=60, **settings
            )
            left = {0, 1} if "rejoin" in second else {0}
            for rank in left:
                assert (rank, 59) in trained.after
            for server in trained.servers:
                assert server.members == left


@pytest.mark.few(2)
@pytest.mark.parametrize("rejoin", [0.11, 0.3])
@pytest.mark.parametrize(
    "synchronization", ["asp", "ssp(0)", "ssp(2)", "r2sp", "bsp(backup=1)", "fedavg(1.0)"]
)
def test_a_worker_may_be_faster_than_the_news_of_it(train, synchronization, rejoin) -> None:
    # The scheduler, the last node, is slow to say that worker 1 left and that it is back.
    trained = train(
        synchronization,
        "parameter_server(2)",
        workers=3,
        steps=40,
        compute="exponential(0.01)",
        latency="50us,1us,50us,50us,50us,30ms",
        faults=[f"crash(1, at=0.1, rejoin={rejoin})"],
        heartbeat_s=0.1,
    )
    for rank in range(3):
        assert (rank, 39) in trained.after
    # Every answer was one that the worker waited for.
    assert not any(trained.engine._mailboxes[rank].inbox for rank in range(3))
    for server in trained.servers:
        assert server.members == {0, 1, 2}

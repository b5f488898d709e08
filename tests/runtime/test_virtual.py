"""The simulator: virtual time, order, failures and what it counts."""

import pytest
import torch
from torch import Tensor

from gradwire.core.errors import DeadlockError
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.coding_time import MeasuredCoding
from gradwire.runtime.virtual.engine import VirtualEngine

ALPHA, BANDWIDTH = 0.25, 1000.0  # seconds, bytes per second


def network(size: int, bandwidth: tuple[float, ...] = (), latency_s: float = ALPHA) -> Network:
    return Network((latency_s,) * size, bandwidth or (BANDWIDTH,) * size)


def message(nbytes: int, fill: int = 0) -> Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


async def nothing(node: Node) -> None:
    pass


def run(engine: VirtualEngine, *programs):
    """The given programs on the first ranks, nothing on the others."""
    return engine.run([*programs, *[nothing] * (engine.size - len(programs))])


# Time on the wire


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 12_345])
def test_a_message_takes_latency_and_transfer_time(nbytes) -> None:
    async def sender(node: Node) -> float:
        await node.send(1, "x", message(nbytes))
        return await node.now()

    async def receiver(node: Node) -> float:
        await node.recv(0, "x")
        return await node.now()

    sent, received = run(VirtualEngine(network(2)), sender, receiver)
    assert sent == 0.0  # handing a message over takes no time
    assert received == pytest.approx(ALPHA + nbytes / BANDWIDTH, rel=1e-12)


@pytest.mark.parametrize("num_senders", range(1, 6))
def test_many_senders_queue_at_one_receiver(num_senders) -> None:
    async def sender(node: Node) -> None:
        await node.send(0, "x", message(500))

    async def receiver(node: Node) -> float:
        for src in range(1, num_senders + 1):
            await node.recv(src, "x")
        return await node.now()

    engine = VirtualEngine(network(num_senders + 1))
    now = run(engine, receiver, *[sender] * num_senders)[0]
    assert now == pytest.approx(ALPHA + num_senders * 500 / BANDWIDTH, rel=1e-12)


@pytest.mark.parametrize("num_receivers", range(1, 6))
def test_one_sender_serves_its_receivers_one_after_the_other(num_receivers) -> None:
    async def sender(node: Node) -> None:
        for dst in range(1, num_receivers + 1):
            await node.send(dst, "x", message(500))

    async def receiver(node: Node) -> float:
        await node.recv(0, "x")
        return await node.now()

    engine = VirtualEngine(network(num_receivers + 1))
    times = run(engine, sender, *[receiver] * num_receivers)[1:]
    expected = [ALPHA + i * 500 / BANDWIDTH for i in range(1, num_receivers + 1)]
    assert times == pytest.approx(expected, rel=1e-12)


def test_sending_and_receiving_do_not_disturb_each_other() -> None:
    async def swap(node: Node) -> float:
        await node.send(1 - node.rank, "x", message(2000))
        await node.recv(1 - node.rank, "x")
        return await node.now()

    times = run(VirtualEngine(network(2)), swap, swap)
    assert times == pytest.approx([ALPHA + 2.0] * 2, rel=1e-12)


def test_messages_in_a_row_share_one_latency() -> None:
    async def sender(node: Node) -> None:
        for _ in range(4):
            await node.send(1, "x", message(1000))

    async def receiver(node: Node) -> list[float]:
        times = []
        for _ in range(4):
            await node.recv(0, "x")
            times.append(await node.now())
        return times

    times = run(VirtualEngine(network(2)), sender, receiver)[1]
    assert times == pytest.approx([ALPHA + 1, ALPHA + 2, ALPHA + 3, ALPHA + 4], rel=1e-12)


@pytest.mark.parametrize(
    ("sender_bandwidth", "receiver_bandwidth"), [(100.0, 1000.0), (1000.0, 100.0)]
)
def test_the_slower_end_sets_the_pace(sender_bandwidth, receiver_bandwidth) -> None:
    async def sender(node: Node) -> None:
        await node.send(1, "x", message(500))

    async def receiver(node: Node) -> float:
        await node.recv(0, "x")
        return await node.now()

    engine = VirtualEngine(network(2, (sender_bandwidth, receiver_bandwidth)))
    assert run(engine, sender, receiver)[1] == pytest.approx(ALPHA + 5.0, rel=1e-12)


def test_slow_senders_reach_one_fast_receiver_in_parallel() -> None:
    async def sender(node: Node) -> None:
        await node.send(0, "x", message(500))

    async def receiver(node: Node) -> float:
        for src in (1, 2, 3):
            await node.recv(src, "x")
        return await node.now()

    engine = VirtualEngine(network(4, (1000.0, 100.0, 100.0, 100.0)))
    assert run(engine, receiver, *[sender] * 3)[0] == pytest.approx(ALPHA + 5.0, rel=1e-12)


def test_a_fast_sender_is_not_held_up_behind_its_slow_receiver() -> None:
    async def sender(node: Node) -> None:
        await node.send(1, "x", message(1000))  # 1 takes ten seconds to take it in
        await node.send(2, "x", message(1000))

    async def receiver(node: Node) -> float:
        await node.recv(0, "x")
        return await node.now()

    engine = VirtualEngine(network(3, (1000.0, 100.0, 1000.0)))
    times = run(engine, sender, receiver, receiver)[1:]
    assert times == pytest.approx([ALPHA + 10.0, ALPHA + 2.0], rel=1e-12)


def test_each_message_pays_the_latency_of_its_sender() -> None:
    async def sender(node: Node) -> None:
        await node.send(2, "x", message(0))

    async def receiver(node: Node) -> list[float]:
        times = []
        for src in (1, 0):
            await node.recv(src, "x")
            times.append(await node.now())
        return times

    engine = VirtualEngine(Network((3.0, 1.0, 50.0), (BANDWIDTH,) * 3))
    assert run(engine, sender, sender, receiver)[2] == [1.0, 3.0]


def test_a_message_to_oneself_never_touches_the_network() -> None:
    async def program(node: Node) -> float:
        await node.send(0, "x", message(10_000, 7))
        assert int((await node.recv(0, "x"))[0]) == 7
        return await node.now()

    engine = VirtualEngine(network(1))
    assert engine.run([program]) == [0.0]
    assert engine.ledger.total_bytes == 0


# Order


def test_messages_of_one_tag_arrive_in_order_and_tags_do_not_mix() -> None:
    async def sender(node: Node) -> None:
        for i in range(6):
            await node.send(1, "even" if i % 2 == 0 else "odd", message(10 * (7 - i), i))

    async def receiver(node: Node) -> list[int]:
        tags = ["odd", "odd", "even", "even", "odd", "even"]
        return [int((await node.recv(0, tag))[0]) for tag in tags]

    assert run(VirtualEngine(network(2)), sender, receiver)[1] == [1, 3, 0, 2, 5, 4]


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "all there"])
def test_from_anyone_means_in_order_of_arrival(late) -> None:
    # 3 arrives first, then 1, then 2: neither by rank nor by when they were sent.
    async def sender(node: Node) -> None:
        await node.sleep({1: 0.02, 2: 0.01, 3: 0.0}[node.rank])
        await node.send(0, "x", message({1: 100, 2: 900, 3: 50}[node.rank]))

    async def receiver(node: Node) -> list[tuple[int, int]]:
        if late:
            await node.sleep(100.0)
        return [(src, len(data)) for src, data in [await node.recv_any("x") for _ in range(3)]]

    bandwidth = (1e6, 1000.0, 1000.0, 1000.0)
    engine = VirtualEngine(network(4, bandwidth))
    found = run(engine, receiver, sender, sender, sender)[0]
    assert found == [(3, 50), (1, 100), (2, 900)]


def test_a_message_asked_for_by_rank_is_not_given_to_anyone() -> None:
    async def sender(node: Node) -> None:
        await node.send(0, "x", message(1, node.rank))

    async def by_rank(node: Node) -> int:
        return int((await node.recv(2, "x"))[0])

    async def receiver(node: Node) -> tuple[int, int]:
        task = await node.spawn(by_rank(node))
        src, _ = await node.recv_any("x")
        return src, await node.join(task)

    assert run(VirtualEngine(network(3)), receiver, sender, sender)[0] == (1, 2)


# Clocks and programs


def test_sleeping_passes_time_for_the_sleeper_only() -> None:
    async def sleeper(node: Node) -> float:
        await node.sleep(2.5)
        await node.sleep(0.5)
        return await node.now()

    async def awake(node: Node) -> float:
        return await node.now()

    engine = VirtualEngine(network(2))
    assert run(engine, sleeper, awake) == [3.0, 0.0]
    assert engine.clocks == [3.0, 0.0]
    assert engine.now == 3.0


def test_time_cannot_be_slept_away_backwards() -> None:
    async def program(node: Node) -> None:
        await node.sleep(-1.0)

    with pytest.raises(ValueError, match="-1"):
        VirtualEngine(network(1)).run([program])


def test_spawned_programs_run_at_once_and_join_gives_their_result() -> None:
    async def child(node: Node, seconds: float) -> str:
        await node.sleep(seconds)
        return f"slept {seconds}"

    async def parent(node: Node) -> tuple[list[str], float]:
        tasks = [await node.spawn(child(node, seconds)) for seconds in (3.0, 1.0)]
        results = [await node.join(task) for task in tasks]
        results.append(await node.join(tasks[0]))  # again: it is still there
        return results, await node.now()

    results, now = VirtualEngine(network(1)).run([parent])[0]
    assert results == ["slept 3.0", "slept 1.0", "slept 3.0"]
    assert now == 3.0


def test_two_may_join_the_same_program() -> None:
    async def child(node: Node) -> int:
        await node.sleep(1.0)
        return 5

    async def joiner(node: Node, task) -> int:
        return await node.join(task)

    async def parent(node: Node) -> list[int]:
        task = await node.spawn(child(node))
        other = await node.spawn(joiner(node, task))
        return [await node.join(task), await node.join(other)]

    assert VirtualEngine(network(1)).run([parent]) == [[5, 5]]


def test_programs_on_one_node_share_its_nic() -> None:
    async def child(node: Node) -> None:
        await node.send(1, "child", message(1000))

    async def sender(node: Node) -> None:
        await node.spawn(child(node))
        await node.send(1, "main", message(1000))

    async def receiver(node: Node) -> float:
        await node.recv(0, "main")
        await node.recv(0, "child")
        return await node.now()

    assert run(VirtualEngine(network(2)), sender, receiver)[1] == ALPHA + 2.0


def test_a_node_is_busy_until_the_last_of_its_programs_ends() -> None:
    async def child(node: Node) -> None:
        await node.sleep(9.0)

    async def parent(node: Node) -> None:
        await node.spawn(child(node))

    engine = VirtualEngine(network(1))
    engine.run([parent])
    assert engine.clocks == [9.0]


def test_clocks_nics_and_ledger_go_on_between_runs() -> None:
    async def sender(node: Node) -> None:
        await node.send(1, "x", message(3000))  # the NIC is busy for three seconds

    async def receiver(node: Node) -> float:
        await node.recv(0, "x")
        return await node.now()

    engine = VirtualEngine(network(2))
    assert run(engine, sender, receiver)[1] == ALPHA + 3.0
    assert engine.clocks == [0.0, ALPHA + 3.0]
    assert run(engine, sender, receiver)[1] == ALPHA + 6.0  # queued behind the first
    assert engine.ledger.total_bytes == 6000


def test_a_message_not_read_in_one_run_is_there_in_the_next() -> None:
    async def sender(node: Node) -> None:
        await node.send(1, "x", message(1, 9))

    async def receiver(node: Node) -> int:
        return int((await node.recv(0, "x"))[0])

    engine = VirtualEngine(network(2))
    run(engine, sender, nothing)
    assert run(engine, nothing, receiver)[1] == 9


# What is counted


def test_the_ledger_counts_by_link_and_label() -> None:
    async def program(node: Node) -> None:
        await node.send((node.rank + 1) % 3, "t", torch.zeros(10), "weight")
        await node.send((node.rank + 1) % 3, "t", torch.zeros(3, dtype=torch.float64), "bias")
        if node.rank == 0:
            await node.send(2, "t", torch.zeros(7, dtype=torch.uint8))

    engine = VirtualEngine(network(3))
    engine.run([program] * 3)
    assert engine.ledger.link_bytes == [[0, 64, 7], [0, 0, 64], [64, 0, 0]]
    assert engine.ledger.link_messages == [[0, 2, 1], [0, 0, 2], [2, 0, 0]]
    assert engine.ledger.tensor_bytes == {"weight": 120, "bias": 72, "": 7}


def test_effects_are_counted() -> None:
    async def program(node: Node) -> None:
        await node.sleep(1.0)
        await node.now()
        await node.call(int)

    engine = VirtualEngine(network(2))
    engine.run([program] * 2)
    assert engine.num_effects == 6


# Computing


class Evaluator:
    """Doubles numbers, and remembers which were asked together."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, requests: list[int]) -> list[int]:
        self.batches.append(requests)
        return [2 * request for request in requests]


def test_requests_outstanding_together_are_evaluated_together() -> None:
    evaluator = Evaluator()

    async def program(node: Node) -> tuple[int, float]:
        await node.sleep(0.3 * node.rank)  # made at 0, 0.3, 0.6, ..., each takes one second
        result = await node.compute(node.rank)
        return result, await node.now()

    engine = VirtualEngine(network(5), evaluate=evaluator, seconds=lambda rank, request: 1.0)
    results = engine.run([program] * 5)
    # When the first is due, at 1.0, those made at 0.3, 0.6 and 0.9 are waiting too.
    assert evaluator.batches == [[0, 1, 2, 3], [4]]
    assert [value for value, _ in results] == [0, 2, 4, 6, 8]
    assert [now for _, now in results] == pytest.approx([1.0, 1.3, 1.6, 1.9, 2.2])


def test_workers_in_step_cost_one_evaluation_a_step() -> None:
    evaluator = Evaluator()

    async def program(node: Node) -> None:
        for step in range(3):
            await node.compute(step)
            for peer in range(node.size):
                await node.send(peer, step, message(10))
            for peer in range(node.size):
                await node.recv(peer, step)

    engine = VirtualEngine(network(4), evaluate=evaluator, seconds=lambda rank, r: 1.0 + rank)
    engine.run([program] * 4)
    assert evaluator.batches == [[0] * 4, [1] * 4, [2] * 4]


def test_the_time_of_a_request_is_that_of_its_node() -> None:
    async def program(node: Node) -> float:
        await node.compute(10)
        return await node.now()

    def seconds(rank: int, request: int) -> float:
        return rank + request

    engine = VirtualEngine(network(3), evaluate=Evaluator(), seconds=seconds)
    assert engine.run([program] * 3) == [10.0, 11.0, 12.0]


def test_an_engine_without_an_evaluator_says_so() -> None:
    async def program(node: Node) -> None:
        await node.compute(1)

    with pytest.raises(RuntimeError, match="without an evaluator"):
        VirtualEngine(network(1)).run([program])


def test_shared_work_is_done_once_and_gives_everyone_the_same_object() -> None:
    calls = []
    x, y = torch.ones(3), torch.ones(3)

    def add(a: Tensor, numbers: tuple[int, ...]) -> Tensor:
        calls.append(1)
        return a + sum(numbers)

    async def program(node: Node) -> tuple[Tensor, Tensor, Tensor]:
        await node.sleep(float(node.rank))
        same = await node.share(add, x, (1, 2))
        other_number = await node.share(add, x, (1, 3))
        other_tensor = await node.share(add, y, (1, 2))  # equal, but not the same object
        return same, other_number, other_tensor

    results = VirtualEngine(network(4)).run([program] * 4)
    assert len(calls) == 3
    for i in range(3):
        assert all(result[i] is results[0][i] for result in results)
    assert float(results[0][0][0]) == 4.0
    assert float(results[0][1][0]) == 5.0


def test_shared_work_is_done_again_when_all_have_had_it() -> None:
    calls = []

    def work(x: Tensor) -> int:
        calls.append(1)
        return len(calls)

    x = torch.ones(1)

    async def turn(node: Node) -> list[int]:
        await node.sleep(float(node.rank))
        first = await node.share(work, x)
        await node.sleep(10.0)
        return [first, await node.share(work, x)]

    assert VirtualEngine(network(3)).run([turn] * 3) == [[1, 2]] * 3


def test_forgotten_shared_work_is_done_again_with_the_same_result() -> None:
    async def program(node: Node) -> list[int]:
        # More than are remembered, so that the second rank finds the first ones forgotten.
        return [await node.share(pow, i, 2) for i in range(200)]

    expected = [i**2 for i in range(200)]
    assert VirtualEngine(network(2)).run([program] * 2) == [expected] * 2


def test_own_work_is_done_by_everyone() -> None:
    calls = []

    async def program(node: Node) -> int:
        return await node.call(lambda x: calls.append(x) or x + 1, 1)

    assert VirtualEngine(network(3)).run([program] * 3) == [2, 2, 2]
    assert len(calls) == 3


def test_local_work_takes_virtual_time_only_if_it_is_charged() -> None:
    def work() -> int:
        return sum(range(200_000))

    async def program(node: Node) -> tuple[float, float]:
        await node.call(work)
        first = await node.now()
        await node.share(work)
        return first, await node.now()

    free = VirtualEngine(network(2))
    assert free.run([program] * 2) == [(0.0, 0.0)] * 2
    assert sum(free.call_s.values()) > 0
    charged = VirtualEngine(network(2), coding=MeasuredCoding())
    times = charged.run([program] * 2)
    assert all(0 < first < second for first, second in times)
    # Work done once passes the same time on every rank that shares it.
    (first0, second0), (first1, second1) = times
    assert second0 - first0 == pytest.approx(second1 - first1)


# Failures


def deadlock(engine: VirtualEngine, *programs) -> str:
    with pytest.raises(DeadlockError) as caught:
        run(engine, *programs)
    return str(caught.value)


def test_a_deadlock_names_every_waiting_rank_and_tag_and_unread_messages() -> None:
    async def first(node: Node) -> None:
        await node.send(1, "hello", message(1))
        await node.recv(1, ("grad", 3))

    async def second(node: Node) -> None:
        await node.recv_any("anything")

    async def child(node: Node) -> None:
        await node.recv(0, "never")

    async def third(node: Node) -> None:
        await node.join(await node.spawn(child(node)))

    report = deadlock(VirtualEngine(network(4)), first, second, third)
    assert "rank 0 waits for a message from rank 1, tag ('grad', 3)" in report
    assert "rank 1 waits for a message from any rank, tag 'anything'" in report
    assert "rank 2 waits for the end of a program it spawned" in report
    assert "rank 2 waits for a message from rank 0, tag 'never'" in report
    assert "rank 1 has an unread message from rank 0, tag 'hello'" in report
    assert "rank 3" not in report


def test_an_engine_can_be_used_again_after_a_deadlock() -> None:
    async def stuck(node: Node) -> None:
        await node.recv(1, "x")

    async def stuck_on_anyone(node: Node) -> None:
        await node.recv_any("x")

    async def sender(node: Node) -> None:
        await node.send(0, "x", message(1, 3))

    async def receiver(node: Node) -> int:
        return int((await node.recv(1, "x"))[0])

    engine = VirtualEngine(network(2))
    deadlock(engine, stuck, nothing)
    deadlock(engine, stuck_on_anyone, nothing)
    assert run(engine, receiver, sender)[0] == 3


def test_a_program_left_waiting_does_not_take_the_messages_of_the_next_run() -> None:
    async def background(node: Node) -> None:
        await node.recv(1, "x")

    async def leaves(node: Node) -> None:
        await node.spawn(background(node))

    async def sender(node: Node) -> None:
        await node.send(0, "x", message(1, 3))

    async def receiver(node: Node) -> int:
        return int((await node.recv(1, "x"))[0])

    engine = VirtualEngine(network(2))
    run(engine, leaves, nothing)
    assert run(engine, receiver, sender)[0] == 3


def test_an_exception_says_whose_it_is_and_when() -> None:
    async def failing(node: Node) -> None:
        await node.sleep(1.5)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        run(VirtualEngine(network(2)), nothing, failing)
    assert caught.value.__notes__ == ["in the program of rank 1 at virtual time 1.5 s"]


@pytest.mark.parametrize("kind", ["call", "share", "send", "sleep"])
def test_an_exception_in_what_was_asked_for_says_so_too(kind) -> None:
    def fail() -> None:
        raise ValueError("in the work")

    async def failing(node: Node) -> None:
        await node.sleep(1.5)
        if kind == "send":
            await node.send(7, "x", message(1))
        elif kind == "sleep":
            await node.sleep(-1.0)
        else:
            await getattr(node, kind)(fail)

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        run(VirtualEngine(network(2)), nothing, failing)
    assert caught.value.__notes__ == ["in the program of rank 1 at virtual time 1.5 s"]


@pytest.mark.parametrize("coding", [None, MeasuredCoding()], ids=["free", "measured"])
@pytest.mark.parametrize("kind", ["call", "share"])
def test_a_program_can_catch_what_its_own_work_raises(kind, coding) -> None:
    def fail() -> None:
        raise ValueError("in the work")

    async def careful(node: Node) -> str:
        try:
            await getattr(node, kind)(fail)
        except ValueError as error:
            await node.sleep(1.0)
            return f"caught: {error}"
        return "nothing happened"

    engine = VirtualEngine(network(2), coding=coding)
    assert engine.run([careful] * 2) == ["caught: in the work"] * 2


def test_an_exception_closes_the_other_programs() -> None:
    closed = []

    async def waiting(node: Node) -> None:
        try:
            await node.recv(0, "x")
        finally:
            closed.append(node.rank)

    async def failing(node: Node) -> None:
        await node.sleep(1.0)
        raise KeyError

    with pytest.raises(KeyError):
        run(VirtualEngine(network(3)), waiting, failing, waiting)
    assert sorted(closed) == [0, 2]


def test_two_programs_cannot_wait_for_the_same_message() -> None:
    async def child(node: Node) -> None:
        await node.recv(1, "x")

    async def parent(node: Node) -> None:
        await node.spawn(child(node))
        await node.sleep(1.0)
        await node.recv(1, "x")

    with pytest.raises(RuntimeError, match="rank 0 already waits for 'x' from 1"):
        run(VirtualEngine(network(2)), parent)


def test_two_programs_cannot_wait_for_the_same_message_from_anyone() -> None:
    async def child(node: Node) -> None:
        await node.recv_any("x")

    async def parent(node: Node) -> None:
        await node.spawn(child(node))
        await node.sleep(1.0)
        await node.recv_any("x")

    with pytest.raises(RuntimeError, match="rank 0 already waits for 'x'"):
        run(VirtualEngine(network(2)), parent)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    async def program(node: Node) -> None:
        await node.send(2, "x", message(1))

    with pytest.raises(ValueError, match=r"rank 0 sends to 2; there are ranks 0 \.\. 1"):
        run(VirtualEngine(network(2)), program)


def test_awaiting_something_else_is_refused() -> None:
    class Other:
        def __await__(self):
            yield self

    async def program(node: Node) -> None:
        await Other()

    with pytest.raises(TypeError, match="which is no effect"):
        VirtualEngine(network(1)).run([program])


def test_every_worker_needs_a_program() -> None:
    with pytest.raises(AssertionError, match="1 programs for 2 workers"):
        VirtualEngine(network(2)).run([nothing])


# Determinism


def test_the_same_programs_give_the_same_times() -> None:
    def history() -> list[list[float]]:
        times: list[list[float]] = [[] for _ in range(5)]

        async def program(node: Node) -> None:
            key = Key(6).private(node.rank)
            for step in range(20):
                sizes = key.at(step).integers(node.size, 3000).tolist()
                await node.sleep(float(key.at(step).child("pause").uniform64(1)))
                for peer in range(node.size):
                    await node.send(peer, step, message(sizes[peer]))
                for _ in range(node.size):
                    src, data = await node.recv_any(step)
                    times[node.rank] += [await node.now(), src, len(data)]

        VirtualEngine(network(5)).run([program] * 5)
        return times

    assert history() == history()

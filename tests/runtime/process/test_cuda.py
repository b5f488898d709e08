"""Tensors on accelerators between real processes: `pytest tests/runtime/process/test_cuda.py`."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.runtime.process.accelerator import device_of_rank
from runtime.process.cuda_cases import COMPRESSIONS
from runtime.process.launching import launch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator (CUDA)")


def check(results: list[dict[str, object]]) -> None:
    for seen in results:
        assert seen.pop("messages")
        assert seen.pop("native", True)
        assert len(seen) == 2 * len(COMPRESSIONS)
        for case, difference in seen.items():
            limit = 1e-6 if case.endswith("native") else 0.0
            assert isinstance(difference, float)
            assert difference <= limit, case


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of_rank("cpu") == torch.device("cpu")
    assert device_of_rank("cuda:1") == torch.device("cuda", 1)
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for local in (0, 3, 6):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert device_of_rank("cuda") == torch.device("cuda", local % 4)
    assert [device.index for device in chosen] == [0, 3, 2]


@needs_cuda
def test_two_ranks_through_pinned_memory(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 2, "runtime.process.cuda_cases:on_gloo", 200)
    assert codes == [0, 0]
    check(results)


@needs_cuda
@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without nccl")
def test_nccl_with_a_rank_for_each_accelerator(tmp_path: Path) -> None:
    size = torch.cuda.device_count()
    codes, results = launch(tmp_path, size, "runtime.process.cuda_cases:on_nccl", 200)
    assert codes == [0] * size
    check(results)

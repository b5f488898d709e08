import torch

from gradwire.kernels.reference import rans
from kernels.triton_cases import Case

_FREQUENCIES = torch.tensor([1, 3000, 0, 500, 595])


def cases():
    for count, lanes in ((0, 1), (1, 1), (50, 1), (50, 64), (1000, 64), (1001, 32)):
        for dtype in (torch.int32, torch.int64, torch.uint8) if count == 1001 else (torch.int32,):
            yield Case(
                "rans",
                "rans_encode",
                f"{count} of {dtype} in {lanes} lanes",
                lambda count=count, lanes=lanes, dtype=dtype: (
                    _symbols(count).to(dtype),
                    _FREQUENCIES,
                    12,
                    lanes,
                ),
                compiled=count == 1001,
            )
        yield Case(
            "rans",
            "rans_decode",
            f"{count} in {lanes} lanes",
            lambda count=count, lanes=lanes: (
                rans.rans_encode(_symbols(count), _FREQUENCIES, 12, lanes),
                _FREQUENCIES,
                12,
                lanes,
                count,
            ),
            compiled=lanes == 64,
        )


def _symbols(count):
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randint(0, 4096, (count,), generator=generator)
    return torch.bucketize(drawn, _FREQUENCIES.cumsum(0), right=True)

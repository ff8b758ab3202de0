"""Owns the row-exact product: weights laid out once, one kernel and one order of accumulation for every number of rows.

Knows no model. fp32 by oneDNN: packed with a batch hint of 16, its bits for a row are the same for every M from 2 to
1,024, in any position, on one or two threads; M = 1 has its own on processors with AVX-512 when K is 1,536 (measured
2026-12-01). Without oneDNN's operator, MKL has one class of bits from M = 4 on. So M is padded to 4 everywhere, which
costs nothing: 4 rows take as long as 1. Warm-up probes what holds on this machine and says so.
"""

from typing import Final

import torch

ROWS_MIN: Final = 4
BATCH_HINT: Final = 16


class Linear:
    """y = x W^T + b for x [num_tokens, in], W [out, in] and b [out] or none.

    fp32 on the CPU is packed; elsewhere it is the device's own product.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._weight: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and has_onednn:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH_HINT)
            self._weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows < ROWS_MIN and x.device.type == "cpu":
            x = torch.cat([x, x.new_zeros(ROWS_MIN - num_rows, x.shape[1])])
        if self._packed is not None:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        else:
            assert self._weight is not None  # one of the two is there since __init__
            result = torch.nn.functional.linear(x, self._weight, self._bias)
        return result[:num_rows]

"""torch's scaled_dot_product_attention over gathered rows: a backend that shares no kernel with any other.

1. Rows are gathered through the tables, request by request, and decoded by torch's own casts, never by ``references``.
2. Everything is fp32: codes times scale, products, probabilities. The output is rounded once, to bf16.
3. The causal tail is a boolean mask; query tokens that see nothing are left out, and get zeros and -inf.
4. The attention operator returns no log-sum-exp; it is computed beside it, from the same rows, by one more product.
5. Heads go in blocks, so that the scores of a block stay within a bound whatever N is.

Source: torch.nn.functional.scaled_dot_product_attention, its "math" implementation: the same one on every device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from harness.backends.protocol import Capabilities, Output, Unsupported
from harness.case import Case
from harness.inputs import Inputs
from references.formats import as_integers
from references.precision import full_precision

#: Elements of the score matrix of one block of heads. The operator copies the keys for each head of it, D fp32 values a score:
#: 1.1 GiB at D = 576, or one head's keys where those alone are more.
_SCORES = 1 << 19


class TorchSdpa:
    """The backend."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What holds for all its cases."""
        return Capabilities(output_format="bf16", empty_rows="zeros", returns_lse=True)

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract on a device, or None."""
        if device.type not in self.capabilities.devices:
            return f"it runs on a CPU and on CUDA or ROCm devices, not on {device}"
        return None

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode.

        Raises:
            Unsupported: if the case lies outside the contract.
        """
        case = inputs.case
        reason = self.why_not(case, inputs.device)
        if reason is not None:
            raise Unsupported(f"{self.name} cannot run {case}: {reason}")
        inputs.out.zero_()
        if inputs.lse is not None:
            inputs.lse.fill_(-torch.inf)
        blocks = 0
        with torch.no_grad(), full_precision(), sdpa_kernel([SDPBackend.MATH]):
            for request, length in enumerate(case.lengths):
                if length:
                    blocks += _attend(inputs, request, length)
        ran: dict[str, str | int] = {"kernel": "scaled_dot_product_attention", "implementation": "math", "splits": 1}
        return Output(out=inputs.out, lse=inputs.lse, what_ran=ran | {"blocks": blocks})


def make(name: str, label: str | None = None) -> TorchSdpa:
    """Make the backend; it has one version, that of the installed torch.

    Raises:
        ValueError: if a version is asked for.
    """
    if label is not None:
        raise ValueError(f"{name} has no versions to choose from, and @{label} asks for one: leave it out")
    return TorchSdpa(name)


def _attend(inputs: Inputs, request: int, length: int) -> int:
    """Compute one request; return the blocks of heads it took."""
    case = inputs.case
    unseeing = max(case.query_tokens - length, 0)
    seeing = case.query_tokens - unseeing
    key = _rows(inputs, request, length).float() * inputs.cache_scale
    value = key[:, : case.latent]
    nope, rope = (part[request, unseeing:].float() for part in (inputs.query_nope, inputs.query_rope))
    query = torch.cat([nope, rope], dim=-1).transpose(0, 1) * inputs.query_scale  # [H, seeing, D]
    token = torch.arange(seeing, device=inputs.device) + (length - seeing)
    mask = torch.arange(length, device=inputs.device) <= token[:, None]  # [seeing, N]
    blocks = 0
    for heads in _blocks(case.heads, seeing * length):
        part = query[heads]
        shape = (part.shape[0], length)
        out = scaled_dot_product_attention(
            part, key.expand(*shape, -1), value.expand(*shape, -1), attn_mask=mask, scale=case.softmax_scale
        )
        inputs.out[request, unseeing:, heads] = out.transpose(0, 1).to(inputs.out.dtype)
        if inputs.lse is not None:
            scores = (part @ key.T * case.softmax_scale).masked_fill_(~mask, -torch.inf)
            inputs.lse[request, unseeing:, heads] = torch.logsumexp(scores, dim=-1).transpose(0, 1)
        blocks += 1
    return blocks


def _blocks(heads: int, scores: int) -> Iterator[slice]:
    size = max(1, _SCORES // scores)
    for first in range(0, heads, size):
        yield slice(first, min(first + size, heads))


def _rows(inputs: Inputs, request: int, length: int) -> Tensor:
    """Gather the codes of a request's tokens through the tables, [N, D]."""
    size = inputs.case.page_size
    count = -(-length // size)
    if inputs.block_table is not None:
        pages = inputs.block_table[request, :count]
    else:
        assert inputs.kv_indptr is not None and inputs.kv_indices is not None, "a case has one form of table or the other"
        first = int(inputs.kv_indptr[request])
        pages = inputs.kv_indices[first : first + count]
    position = torch.arange(length, device=inputs.device)
    page = pages.long()[position // size]
    # Indexing goes by integers of the codes' width: it is not implemented for every fp8 type.
    return as_integers(inputs.cache)[page, position % size].view(inputs.cache.dtype)

"""Products of matrices: in the type of the sums, or of bf16 with sums in fp32 where a GPU has them.

On a CPU, bf16 and fp16 factors are made fp32 first: a product there would be rounded to 16 bits.
So they are on a GPU where torch is too old to widen, or where hidden states and weight are not
both bf16; fp16, whose smallest number is 6e-8, would lose the gradient of unlikely ids.

Promises: no sum in 16 bits. With bf16 factors the gradient of logits is rounded to bf16, as it
is in plain autograd over bf16 logits, and what it is multiplied into is not.
"""

from __future__ import annotations

import torch


def factor_type(hidden: torch.Tensor, weight: torch.Tensor, summed: torch.dtype) -> torch.dtype:
    """Return the type that factors are to be in, for products in the type ``summed``."""
    both = hidden.dtype == weight.dtype == torch.bfloat16
    return torch.bfloat16 if both and summed == torch.float32 and _widens(weight) else summed


def multiply(a: torch.Tensor, b: torch.Tensor, *, into: torch.Tensor) -> None:
    """Write a @ b into ``into``."""
    if a.dtype == into.dtype:
        torch.mm(a, b, out=into)
    else:
        torch.mm(a, b, out_dtype=into.dtype, out=into)


def add_product(a: torch.Tensor, b: torch.Tensor, *, to: torch.Tensor) -> None:
    """Add a @ b to ``to``."""
    if a.dtype == to.dtype:
        to.addmm_(a, b)
    else:
        torch.addmm(to, a, b, out_dtype=to.dtype, out=to)


def _widens(tensor: torch.Tensor) -> bool:
    """Whether torch can multiply bf16 into fp32 where this lies: from 2.8 on, on CUDA."""
    return tensor.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads()

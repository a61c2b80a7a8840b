"""Repairs Triton's interpreter where it stops vLLM's kernels from running at all."""

from __future__ import annotations


def repair_comparisons() -> bool:
    """Give comparisons their own type; returns whether this Triton needed it.

    Triton 3.9's interpreter labels the result of a comparison with the type of its operands. A
    scalar condition that is spread over a block then becomes integers, and the mask made of it
    is refused ("mask has unsupported dtype"): drafting with probabilities, grammar masks and
    n-gram drafts all end there.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def compare() -> object:
        one = interpreter.TensorHandle(np.array([1], np.int64), tl.int64)
        return interpreter.interpreter_builder.create_icmpSGT(one, one).dtype

    if compare() == tl.int1:
        return False
    builder = type(interpreter.interpreter_builder)
    original = builder.binary_op

    def binary_op(self: object, lhs: object, rhs: object, op: object) -> object:
        result = original(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
        return result

    builder.binary_op = binary_op
    return True

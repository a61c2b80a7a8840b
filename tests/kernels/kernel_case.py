"""What one line of the compile table compiles; `cases_OP.py` beside this file lists them for OP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.compiler import ASTSource

if TYPE_CHECKING:
    import triton

TRITON_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
FP8_NAMES = {"sm_90": "fp8e4nv", "sm_100": "fp8e4nv", "gfx942": "fp8e4b8"}  # none on sm_80


class Case(NamedTuple):
    """A kernel as one launch would specialise it: aligned pointers and strides, 32-bit integers.

    ``constants`` are the constexprs and the pointers that are None. An argument that is neither
    there nor in ``types`` is a pointer to ``rows`` if its name ends so, else an int32.
    """

    label: str
    kernel: triton.JITFunction
    constants: dict[str, Any]
    types: dict[str, str] = {}  # noqa: RUF012 (never written)
    rows: str = "bf16"
    num_warps: int = 4
    num_stages: int = 2
    aligned: bool = True

    def source(self) -> ASTSource:
        signature, attributes = {}, {}
        names = self.kernel.arg_names
        for index, name in enumerate(names):
            default = f"*{self.rows}" if name.endswith("_ptr") else "i32"
            is_constant = name in self.constants
            signature[name] = "constexpr" if is_constant else self.types.get(name, default)
            if self.aligned and name.endswith(("_ptr", "_stride")) and not is_constant:
                attributes[(index,)] = [["tt.divisibility", 16]]
        unknown = (self.constants.keys() | self.types.keys()) - set(names)
        assert not unknown, f"{self.label}: {sorted(unknown)} are no arguments of the kernel"
        places = {(names.index(name),): value for name, value in self.constants.items()}
        return ASTSource(self.kernel, signature, places, attributes)

"""CuPy: ``cupy_steps.py FOLDER [managed]``: a kernel of its own, a product and random numbers, step
by step.

With ``managed`` all device memory is managed memory (cudaMallocManaged), which the driver cannot
checkpoint.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import cupy
from steplog import Steps

KERNEL = r"""
extern "C" __global__ void mix(float *x, const float *y, int n, int step) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = tanhf(0.5f * x[i] + y[i] + 0.001f * ((i + step) % 17));
}
"""
SIDE = 512


def main() -> None:
    """Step until asked to stop."""
    if len(sys.argv) > 2 and sys.argv[2] == "managed":
        cupy.cuda.set_allocator(cupy.cuda.malloc_managed)
    mix = cupy.RawKernel(KERNEL, "mix")
    generator = cupy.random.default_rng(7)
    x = cupy.arange(SIDE * SIDE, dtype=cupy.float32).reshape(SIDE, SIDE) / (SIDE * SIDE)
    weights = generator.standard_normal((SIDE, SIDE), dtype=cupy.float32) / SIDE
    steps = Steps()
    for number in steps:
        y = x @ weights
        y += generator.standard_normal((SIDE, SIDE), dtype=cupy.float32) * cupy.float32(0.01)
        blocks = (SIDE * SIDE + 255) // 256
        mix((blocks,), (256,), (x, y, cupy.int32(SIDE * SIDE), cupy.int32(number)))
        steps.log(float(x[0, 0]), cupy.asnumpy(x).tobytes())


if __name__ == "__main__":
    main()

"""Train in JAX: a jitted step of gradient descent, with momentum."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Two runs must choose the same kernels: nothing is tuned by measuring, and only deterministic ones
# are used.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from steplog import Steps

WIDTH = 256


def loss_of(parameters: Any, rows: Any, wanted: Any) -> Any:
    """The mean square error."""
    hidden = jnp.tanh(rows @ parameters["first"])
    return ((hidden @ parameters["second"] - wanted) ** 2).mean()


def step(parameters: Any, moments: Any, rows: Any, wanted: Any) -> Any:
    """One step: loss, parameters, moments."""
    loss, slopes = jax.value_and_grad(loss_of)(parameters, rows, wanted)
    moments = jax.tree.map(lambda moment, slope: 0.9 * moment + slope, moments, slopes)
    parameters = jax.tree.map(lambda value, moment: value - 0.001 * moment, parameters, moments)
    return loss, parameters, moments


def main() -> None:
    """Train until asked to stop."""
    compiled = jax.jit(step)
    first, second = jax.random.split(jax.random.key(7))
    parameters = {
        "first": jax.random.normal(first, (WIDTH, 512)) * 0.05,
        "second": jax.random.normal(second, (512, 1)) * 0.05,
    }
    moments = jax.tree.map(jnp.zeros_like, parameters)
    steps = Steps()
    for number in steps:
        rows = np.random.default_rng(number).standard_normal((64, WIDTH), dtype=np.float32)
        wanted = rows.sum(1, keepdims=True)
        loss, parameters, moments = compiled(parameters, moments, rows, wanted)
        held = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((parameters, moments))]
        steps.log(float(loss), *held)


if __name__ == "__main__":
    main()

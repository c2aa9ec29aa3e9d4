"""Fixtures of the tests with devices: the stand-in for the driver."""

from support.gpu_standin import board, driver, gpu, gpu_criuctl, standin

__all__ = ["board", "driver", "gpu", "gpu_criuctl", "standin"]

"""The few calls of the driver's API that the programs need which use nothing else; they start in a
second.
"""

from __future__ import annotations

import ctypes

_cuda = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Call the driver; end the program if it answers an error."""
    answer = getattr(_cuda, name)(*arguments)
    if answer:
        raise SystemExit(f"{name} answers {answer}")


def start() -> None:
    """Start the driver and make the first device's primary context current."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)


class Buffer:
    """Memory on the device."""

    def __init__(self, size: int, *, managed: bool = False) -> None:
        self.size = size
        self._pointer = ctypes.c_uint64()
        length = ctypes.c_size_t(size)
        if managed:
            call("cuMemAllocManaged", ctypes.byref(self._pointer), length, ctypes.c_uint(1))
        else:
            call("cuMemAlloc_v2", ctypes.byref(self._pointer), length)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy `data` there."""
        there = ctypes.c_uint64(self._pointer.value + offset)
        call("cuMemcpyHtoD_v2", there, data, ctypes.c_size_t(len(data)))

    def read_into(self, address: int, size: int) -> None:
        """Copy its first `size` bytes to host memory at `address`."""
        call("cuMemcpyDtoH_v2", ctypes.c_void_p(address), self._pointer, ctypes.c_size_t(size))

    def read(self) -> bytes:
        """All of it."""
        data = ctypes.create_string_buffer(self.size)
        self.read_into(ctypes.addressof(data), self.size)
        return data.raw

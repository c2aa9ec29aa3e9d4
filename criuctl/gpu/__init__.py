"""GPU processes, by the NVIDIA driver's own checkpoint interface (driver 570 and newer).

The driver moves a process's device memory into ordinary anonymous memory of that process and closes
the device; from then on CRIU dumps it like any other process. The calls, in their order:

- dump: *lock* every process (no call of the program enters the driver any more), *checkpoint*
  every process, then CRIU; if the tree runs on: *restore* and *unlock*;
- restore: CRIU, with every thread of the tree held but the driver's own restore thread, then
  *restore*, *unlock*, and only then the program goes on.

Modules: `helper` is a separate program that loads the driver's library once and makes the calls;
when its caller dies, it gives the devices back. `driver_process` starts it and sends it requests,
for several processes at a time, each with a deadline. `use` finds from descriptors and mappings
which processes of a tree use a device, and how. `devices` describes devices and pairs those of a
checkpoint with those of a host. None of them is loaded where no process uses a device.

Limits, all of them the driver's: no managed memory (cudaMallocManaged), MIG, MPS or peer access.
AMD GPUs are left to CRIU's amdgpu plugin, which CRIU loads itself where it is installed.
"""

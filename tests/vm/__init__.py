"""The second level of migration tests: two real machines with stock Debian kernels, run by hand
with ``scripts/vm-test``.

The default tests make their hosts of namespaces, on one kernel.  Here each host has its own, which
tracks changed pages, and a systemd, a power plug and a network cable.  What is done, is done by the
commands that a user types; the outcome is judged from outside, by this machine, which neither
host can lie to.

    machine.py   one QEMU machine: its power, its cable, commands on it
    base.py      what every lab has: disks, and criuctl by scripts/setup
    lab.py       two machines, ``alpha`` and ``beta``, made one like the other
    teller.py    the program that moves: it counts, listens, remembers
    outside.py   what is heard of the tellers
    checks.py    what must be so
    alone.py     one machine, ``sigma``, for ``scripts/vm-test systemd``
    systemd.py   what must be so on it: timers, units, logins, reboots
    hold.py      criuctl, held at a step
    result.py    the table, RESULT.md and SYSTEMD.md

Nothing in this folder is collected by pytest.
"""

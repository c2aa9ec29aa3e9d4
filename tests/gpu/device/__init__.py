"""Real GPU programs under criuctl, on a machine with an NVIDIA device; `scripts/gpu-test` runs it.

`pack` gathers what such a machine needs, `place` sets it up there without a network, `cases` are
the programs and what is done to them, `report` writes the result; `bench` and `probe` measure.
Only `programs` import GPU libraries; they run in the Python that has those, criuctl in one of its
own, and everything else here needs the standard library alone.
"""

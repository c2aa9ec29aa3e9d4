"""Preflight checks: what CRIU refuses, found before anything is frozen; one module per part of the
kernel.

A check is a generator of findings from a `Scene`: it looks and never acts, and never raises for
what it finds.  An *error* is what makes CRIU (with the options that criuctl gives) refuse or what
cannot be restored, a *warning* is what is lost or may fail, *info* is what criuctl will do about
something.  Each error stands for a refusal in CRIU's sources that was seen with a real process; the
tests repeat it.  A check that is not sure reports nothing: CRIU's own refusal costs a short freeze,
a false one costs the dump.
"""

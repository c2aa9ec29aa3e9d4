"""The steps of a dump, in the order of `criuctl.dump.story`: the look before it, the freeze, what
is taken, the manifest.
"""

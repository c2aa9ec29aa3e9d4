"""The steps of a dump, in the order of `criuctl.ops.dump`: the look before it, the freeze, what is taken, the manifest."""

"""The steps of a restore, in the order of `criuctl.ops.restore`: the plan, the images, CRIU's part, the answer."""

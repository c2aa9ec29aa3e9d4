"""The steps of a restore, in the order of `criuctl.restore.story`: the plan, the images, CRIU's
part, the answer.
"""

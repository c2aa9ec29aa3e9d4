"""How two criuctl on two hosts speak with each other: a link of frames, over the streams of the
system's ssh.
"""
